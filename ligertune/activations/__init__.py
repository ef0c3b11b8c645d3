"""Activation memory: gradient checkpointing, recomputation, offloading to the host."""
