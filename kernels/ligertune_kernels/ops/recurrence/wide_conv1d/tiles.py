"""Tiles of the convolution of 5 to 8 taps; not measured yet."""

# 16 numbers of a thread
WIDE_TOKENS = 32
WIDE_COLS = 64
WIDE_WARPS = 4
