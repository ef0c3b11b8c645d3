"""Output heads outside their model's forward: scale, soft cap, and what is refused."""
