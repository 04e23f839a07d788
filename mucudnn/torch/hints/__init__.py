"""Plans as hints for PyTorch's own partitioner and checkpoints: no peak is promised."""
