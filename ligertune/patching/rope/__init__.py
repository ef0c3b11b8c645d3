"""Rotary position embeddings: recognise rotary functions by their numbers, and call `apply_rope` instead."""
