"""A program on real tensors, processes and messages: the loop of a rank, and everything that it needs."""
