"""Comparison of training with and without the kernels: interleaved runs in new processes, with loss parity."""
