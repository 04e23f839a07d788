"""Frozen values as JSON, and back; what foreign hands wrote is checked here."""
