"""A budget in, a planned step out."""
