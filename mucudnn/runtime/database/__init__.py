"""What was measured, kept in files."""
