"""Log-probabilities of tokens, without stored logits."""
