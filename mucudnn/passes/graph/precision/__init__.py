"""Mixed precision: low-precision activations, parameter copies, and loss scaling."""
