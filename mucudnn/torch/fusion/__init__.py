"""Runs of neighbouring nodes as one node each, which PyTorch's Inductor compiles."""
