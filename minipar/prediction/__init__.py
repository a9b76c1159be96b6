"""Time and memory without running: the simulator, costs of a measured or an imagined machine, formulas.

estimating.py is `minipar.estimate`, which asks formulas or simulates; validation.py holds it against published numbers.

    plan_numbers.py    a plan as numbers, and which layers each of its ranks holds; plan_words.py reads it from words
    closed_form.py     the time as a formula; replica.py where it is not exact
    rank_memory.py     the memory of a rank as a formula; on_paper.py shows it for `minipar memory`
    memory.py          the memory along a program, from tapes of measured layers, for the prediction that train() makes
    fitting.py         what would fit; advice.py after a run that did not
    on_paper.py        the whole program on an emulated device, simulated with costs from formulas

Begin with plain_simulator.py: it is `simulate` as one fold over `order`. simulator.py gives the same times faster. If
there are fewer cores than ranks, oversubscription.py shares the cores. AMPNet and parameter servers (service.py) decide
by the clock of `program/event_loop.py`. Receives that are posted ahead cost memory but no time.
"""
