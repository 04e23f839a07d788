"""What commands compute."""
