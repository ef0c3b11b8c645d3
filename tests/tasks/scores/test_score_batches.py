"""Batches of scores against plain PyTorch: positions, divisors, measures."""
