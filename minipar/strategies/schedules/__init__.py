"""The order in which a rank works on its micro-batches: one file a schedule. No torch here."""
