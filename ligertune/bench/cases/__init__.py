"""Benchmark cases: each kernel with its baselines and lower bounds."""
