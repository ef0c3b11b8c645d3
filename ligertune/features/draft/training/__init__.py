"""Training of draft heads: steps of training-time test, losses, the model that trains, and its runs."""
