"""Plan a training step within a memory budget."""
