"""Float8 operands of matrix products."""
