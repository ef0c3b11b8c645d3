"""A teacher's written log-probabilities against transformers, and the loss that reads them."""
