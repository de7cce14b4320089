"""Measuring a running server from outside, over its public API."""
