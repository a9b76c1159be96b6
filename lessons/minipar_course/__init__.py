"""What the lessons need besides the engine: checks of exercises, copies of notebooks, the lessons' own experiments."""
