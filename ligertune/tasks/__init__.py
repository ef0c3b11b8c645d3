"""Training tasks: what the loss divides by, and Medusa heads."""
