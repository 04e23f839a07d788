"""Measurements and plans of PyTorch steps, remembered from process to process."""
