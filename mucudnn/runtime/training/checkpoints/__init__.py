"""Checkpoint files: saving and resuming a training."""
