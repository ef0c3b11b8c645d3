"""Benchmarks of the kernels against eager code, torch and torch.compile: time, memory and error."""
