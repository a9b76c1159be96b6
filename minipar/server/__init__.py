"""The parameter server on real processes: its messages, its order of updates, its workers."""
