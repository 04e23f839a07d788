"""Studies: computations behind the commands, without input or output."""
