"""One file an idea: schedules, and the passes that turn them into programs. No torch here.

Importing the package registers the built-in schedules.
"""

from minipar.strategies import gpipe, naive, one_f_one_b
from minipar.strategies.registry import find, schedule, schedules

__all__ = ["find", "gpipe", "naive", "one_f_one_b", "schedule", "schedules"]
