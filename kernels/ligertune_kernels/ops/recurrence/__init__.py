"""Recurrences of linear attention, and the short causal convolution in front of them."""
