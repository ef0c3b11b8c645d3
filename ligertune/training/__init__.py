"""Training: one loop on accelerate, and the parts it is made of."""
