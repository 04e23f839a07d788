"""Execution of planned PyTorch steps: generated code, copies, and offload targets."""
