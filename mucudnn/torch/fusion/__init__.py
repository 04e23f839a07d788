"""Fusion: runs of neighbouring nodes as one kernel that PyTorch's Inductor compiles."""
