"""Passes: they make a program from the order of a schedule. Each pass has a file of its own. No torch here."""
