"""The tasks of the lessons: one module for each topic, with its tasks in capitals, made of the kinds in `kinds/`.

from minipar import exercise
from minipar.course.exercises import programs as tasks

exercise.check(step_time, tasks.GPIPE_TIME)
"""
