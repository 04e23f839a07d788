"""Steps, epochs, checkpoints."""
