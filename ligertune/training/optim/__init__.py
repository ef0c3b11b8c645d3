"""Optimizers, learning-rate schedule and gradient clipping."""
