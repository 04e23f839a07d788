"""A step in slices: which axis, how many parts, which rows, in which order."""
