"""Commands that measure: bench, compare and eval."""
