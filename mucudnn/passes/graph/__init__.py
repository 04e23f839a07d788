"""Graph in, graph out: what a training step consists of."""
