"""What the lessons need beside the engine: checks of exercises, copies of notebooks, the lessons' own experiments."""
