"""State space duality (Mamba 2): the op, its step for generation, and mamba_ssm's functions."""
