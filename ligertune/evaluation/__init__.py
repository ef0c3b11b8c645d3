"""`ligertune eval`: measures of a trained model on held-out data, next to those of its base model."""
