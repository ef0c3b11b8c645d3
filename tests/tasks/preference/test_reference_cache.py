"""Stored reference log-probabilities: what their key depends on."""
