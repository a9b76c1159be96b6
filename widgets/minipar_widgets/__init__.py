"""Interactive pictures of programs and traces for Jupyter. The first widgets arrive with a later issue."""

__version__ = "0.1.0"
