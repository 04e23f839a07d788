"""Planning passes: pure functions from values to values, no arrays, clock or I/O."""
