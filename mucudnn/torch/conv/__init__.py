"""Planned convolutions of unmodified PyTorch models."""
