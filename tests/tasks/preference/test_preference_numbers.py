"""Losses and measures of preferences against formulas by hand and numbers recorded from TRL."""
