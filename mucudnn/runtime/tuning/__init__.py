"""Measure, plan, prove: from a problem to what runs it."""
