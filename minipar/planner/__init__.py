"""Searches for good plans: exact ones (linear programming) and learned ones, each beside a simple baseline.

This package imports nothing by itself; `minipar.planner.linear` needs scipy, `minipar.planner.placement` torch.
"""
