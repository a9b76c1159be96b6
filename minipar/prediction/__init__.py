"""Time and memory without running: the simulator, costs of a measured or an imagined machine, formulas."""
