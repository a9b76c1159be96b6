"""What turns the order of a schedule into a program of ranks that share work and memory: one file a pass. No torch."""
