"""Choice of a memory layout (channels first or last) for each node of a network."""
