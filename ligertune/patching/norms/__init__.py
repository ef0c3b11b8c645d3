"""Norms: recognise them by their numbers, and compute them by our kernels."""
