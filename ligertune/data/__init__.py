"""From a recipe's data sets to token ids and labels: sources, formats, render, encode, prepare, batches."""
