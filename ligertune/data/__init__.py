"""Data: from the data sets of a recipe to batches of token ids and labels."""
