"""Kinds of tasks, which topics fill in: a formula, a function, a schedule, a pass over programs.

A task is anything with `judge(answer) -> Verdict`; one that is of none of these kinds stands in its topic's own module.
"""
