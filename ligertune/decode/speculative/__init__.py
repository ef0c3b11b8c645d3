"""Speculative decoding: trees of candidates that one forward pass verifies, and the text in the model's KV cache."""
