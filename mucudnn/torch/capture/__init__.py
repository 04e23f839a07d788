"""PyTorch's graphs of a training step, as it is written down before planning."""
