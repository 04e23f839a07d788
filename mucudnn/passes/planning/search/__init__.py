"""Search for the fastest residencies on the simulator."""
