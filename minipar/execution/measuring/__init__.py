"""Measurements that predictions are made of: a model's layers, a cluster's messages, copies to slower memory."""
