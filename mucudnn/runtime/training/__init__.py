"""Train networks: steps within a budget, epochs, checkpoints."""
