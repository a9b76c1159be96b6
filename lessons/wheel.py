"""A step of building the wheel (pyproject.toml): the course's package lies beside minipar, the notebooks in it.

Hatch gives all that is in a folder one place, so that the package, which lies among the notebooks, is named here.
"""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CourseHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":  # (an editable installation finds the package in lessons/)
            build_data["force_include"]["lessons/minipar_course"] = "minipar_course"
