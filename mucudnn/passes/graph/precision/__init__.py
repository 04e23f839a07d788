"""Narrow types: who computes in them, what keeps copies, how gradients are scaled."""
