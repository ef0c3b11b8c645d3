"""Reference log-probabilities are those of the model before training, however they are computed."""
