"""Decide: pure functions from values to values. No arrays, no clock, no I/O."""
