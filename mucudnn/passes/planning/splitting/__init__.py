"""Whole or in slices: the ways to run a step, and the fastest of them."""
