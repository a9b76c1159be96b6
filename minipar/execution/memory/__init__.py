"""Where a run's bytes are: measured storage by storage, bounded by a device's capacity, and predicted.

    series.py       memory of a rank during one pass through its program: every change, its kind and its layer
    lifetimes.py    the same from the program alone: values from the instruction that writes to the one that frees
    storages.py     follows live storages by torch's dispatch hooks
    tracker.py      that, for a rank's executor: kinds, layers, instructions, capacity
    watching.py     whether a run follows its memory, and for how many passes it keeps what happened
    capacity.py     what `DeviceOutOfMemory` says
    advice.py       plans near one that did not fit that would, as predicted
    neighbours.py   which plans are near one
    tape.py         what one layer allocates and frees, in order, alone on one device
    prediction.py   tapes laid along a program: the series that a rank will have
    forecast.py     that, for all ranks of a predicted trace

What series, lifetimes, neighbours, capacity and prediction do needs no torch.
"""
