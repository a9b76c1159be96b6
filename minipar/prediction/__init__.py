"""Time and memory without running: the simulator, costs of a measured or an imagined machine, formulas.

Begin with plain_simulator.py: `simulate` in one fold over `order`. simulator.py gives the same times faster. With fewer
cores than ranks oversubscription.py shares the cores; AMPNet (dynamic.py) and parameter servers (service.py) decide by
the clock of `program/event_loop.py`. Receives that are posted ahead cost memory, and no time.
"""
