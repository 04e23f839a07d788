"""One step of a training: planned, placed, and taken."""
