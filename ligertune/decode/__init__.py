"""Decoding: continue a prompt with a trained model."""
