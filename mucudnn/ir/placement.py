"""How tensors get their places: names that a user gives."""

__all__ = ["PLACEMENTS", "STATIC", "VIRTUAL"]

STATIC, VIRTUAL = "static", "virtual"
PLACEMENTS = (STATIC, VIRTUAL)
"""Each in one piece; or also in pieces that are mapped in a row of addresses, where
that needs less memory or is faster."""
