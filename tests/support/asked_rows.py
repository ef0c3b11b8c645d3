"""Rows with images, as data sets hold them."""

from __future__ import annotations

from pathlib import Path


def asked(question: str, answer: str, *images: str | Path) -> dict:
    """A row in LLaVA's form."""
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"images": [str(image) for image in images], "conversations": turns}
