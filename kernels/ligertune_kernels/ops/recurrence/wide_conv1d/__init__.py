"""causal_conv1d for 5 to 8 taps."""
