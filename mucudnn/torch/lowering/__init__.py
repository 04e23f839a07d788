"""From PyTorch's graphs to ours: what each node is, and how it is called."""
