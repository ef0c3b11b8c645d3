"""Bases whose checkpoints are quantised: recognised, trained with adapters, and exported in 16 bits."""
