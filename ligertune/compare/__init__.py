"""With and without the kernels, side by side: the same recipe in fresh processes, interleaved, with loss parity."""
