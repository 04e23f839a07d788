"""Describe: immutable values that all other layers exchange. Standard library only."""
