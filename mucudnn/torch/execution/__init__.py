"""A planned step, run: its program in Python, and its copies to and from the host."""
