"""Capture of training steps as PyTorch graphs."""
