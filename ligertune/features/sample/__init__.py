"""Answers that a model gives to the prompts of a recipe, scored and kept as training data: `ligertune sample`."""
