"""A trial task: language modelling of texts in a column of their own, with smoothed labels."""
