"""Lowering of PyTorch graphs to `Graph`, with a call for each node."""
