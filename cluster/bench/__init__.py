"""Measuring a server from outside, over its public API: one that runs, or fresh ones started for the purpose."""
