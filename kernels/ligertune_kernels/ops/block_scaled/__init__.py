"""Weights that share a scale within a block of them, as published checkpoints store them."""
