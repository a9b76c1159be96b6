"""Kinds of tasks, such as a formula, a function, a schedule, a pass over programs. Topics make their tasks of them.

A task is anything with `judge(answer) -> Verdict`; one that is of none of these kinds is in its topic's own module.
"""
