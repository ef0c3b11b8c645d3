"""Recipes that come with the package."""

from __future__ import annotations

from pathlib import Path


def bundled(name: str) -> Path:
    """The file `name` under configs/, in a checkout or where the package is installed."""
    home = Path(__file__).resolve().parents[1]
    folders = (home / "configs", home.parent / "configs")
    return next((folder / name for folder in folders if (folder / name).is_file()), folders[0] / name)
