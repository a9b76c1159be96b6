"""The tasks of the lessons: one module for each topic, with its tasks in capitals, made of the kinds in `kinds/`.

from minipar_course import exercise
from minipar_course.exercises import programs as tasks

exercise.check(step_time, tasks.GPIPE_TIME)
"""
