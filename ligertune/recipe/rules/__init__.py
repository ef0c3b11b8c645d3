"""Rules between recipe keys."""
