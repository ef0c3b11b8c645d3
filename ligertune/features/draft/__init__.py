"""Draft heads for speculative decoding: EAGLE-3 (Li et al. 2025), as inference servers load them."""
