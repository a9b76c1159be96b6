"""Time and memory without running: the simulator, costs of a measured or an imagined machine, formulas.

estimating.py is `minipar.estimate`, closed_form.py its formulas, validation.py holds them against published numbers.

Begin with plain_simulator.py: it is `simulate` as one fold over `order`. simulator.py gives the same times faster. If
there are fewer cores than ranks, oversubscription.py shares the cores. AMPNet (dynamic.py) and parameter servers
(service.py) decide by the clock of `program/event_loop.py`. Receives that are posted ahead cost memory but no time.
"""
