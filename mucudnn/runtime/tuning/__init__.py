"""Measure, plan and validate convolutions, and run their plans."""
