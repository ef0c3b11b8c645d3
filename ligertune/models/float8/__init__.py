"""Float8 linear layers: which ones, their scales, and their products."""
