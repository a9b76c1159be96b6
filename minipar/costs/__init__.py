"""Numbers: what a model, a device and a link cost. No torch here; `execution/measuring` measures with it.

    protocol.py       the costs that a simulation needs; unit.py has costs from times given by hand
    device.py         what one device can do, and devices by name
    hardware.py       machines of many devices, by name: peaks, links, and the part of them that is reached
    quantities.py     numbers with units
    measured.py       what a profile measured of a model's layers; rates.py what a calibration measured of a cluster
    links.py          messages and rings on a link; alpha_beta.py for the programs of collectives
    analytic.py       operations and bytes of a model by name or numbers, also divided by tp and ep
    partition.py      the best way to cut a chain of layers into stages, exactly
    slicing.py        lengths of a sequence's slices
    recomputation.py, reversal.py   which layers to recompute: every K, sqrt, a budget

A profile times layers in the order of a step, in runs that keep at most 64 MiB, so that caches are as in a step. Each
layer runs alone, on a copy, with its real inputs. With one CPU thread, times are the CPU time of that thread, so other
programs disturb them little. Of published models only numbers are known.
"""
