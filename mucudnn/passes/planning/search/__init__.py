"""Residencies tried on the simulator, better ones kept."""
