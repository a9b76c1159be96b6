"""`train()` and `evaluate()`: data, a model and a plan on a cluster; and the plain torch that they must equal."""
