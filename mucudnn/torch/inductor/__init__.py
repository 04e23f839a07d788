"""Kernels of one `torch.compile` as nodes of a planned step."""
