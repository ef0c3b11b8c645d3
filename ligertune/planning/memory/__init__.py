"""Memory prediction: model states, activations, and what fits on the device."""
