"""Run a step in slices (micro-batches or spatial tiles): axes, parts, rows, order."""
