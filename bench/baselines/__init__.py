"""What a planned step is compared with."""
