"""Processes of a run: how they share the model and wait for each other."""
