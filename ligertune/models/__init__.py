"""Models: load and save them, choose what trains (LoRA, freezing), read their sizes, compile and float8."""
