"""Gated activations of MLPs."""
