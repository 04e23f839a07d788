"""What: frozen values that the other layers exchange. Standard library only."""
