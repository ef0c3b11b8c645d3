"""Reference log-probabilities: mode, ranks, order, adapters, and the key under which they are stored."""
