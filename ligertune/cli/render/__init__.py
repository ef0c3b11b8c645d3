"""Terminal output: the only code that prints."""
