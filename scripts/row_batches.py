"""Batches of full rows, for benchmarks of whole steps."""

from __future__ import annotations

LENGTH = 512  # tokens of a row, unless --length says otherwise


def scaled(batches: str, length: int) -> str:
    """Scale batch sizes (4,16,32) from rows of 512 tokens to rows of `length`: as many tokens, and at least one row."""
    return ",".join(dict.fromkeys(str(max(1, int(batch) * LENGTH // length)) for batch in batches.split(",")))
