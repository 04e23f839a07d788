"""Placement of storages at offsets in an arena of a given size."""
