"""Mixers of hybrid models: convolution and recurrence by our kernels."""
