"""What nodes cost: times, scratch memory, and the rate of copies."""
