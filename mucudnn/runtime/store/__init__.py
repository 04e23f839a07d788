"""Persistent storage of measurements: the SQLite cache, recordings, step tables."""
