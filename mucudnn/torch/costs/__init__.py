"""Costs of nodes: times, scratch memory, and copy rates."""
