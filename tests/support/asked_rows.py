"""Records with images."""

from __future__ import annotations

from pathlib import Path


def asked(question: str, answer: str, *images: str | Path) -> dict:
    """Return a record in LLaVA's format."""
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"images": [str(image) for image in images], "conversations": turns}
