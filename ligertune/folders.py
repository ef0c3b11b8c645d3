"""Folders that are complete or absent: written aside, then renamed. A kill leaves the old one, the new one, or none."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def put_in_place(aside: Path, final: Path) -> None:
    """Let `aside`, which is complete, take the name and the place of `final`."""
    flush(aside)
    remove(final)
    os.replace(aside, final)
    flush(final.parent, files=False)


def remove(folder: Path) -> None:
    """Remove a folder that may not be there. Renamed first: a kill must not leave half of it under its name."""
    if not folder.exists():
        return
    doomed = folder.with_name(f".{folder.name.strip('.').removesuffix('.partial')}.old.partial")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(folder, doomed)
    shutil.rmtree(doomed)


def flush(folder: Path, *, files: bool = True) -> None:
    """Ask the system to put a folder's names, and its files, on the disk before a rename relies on them."""
    if os.name != "posix":
        return
    inside = [entry for entry in folder.rglob("*") if entry.is_file()] if files else []
    for path in [*inside, folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """What a kill in the middle of a write left aside in `folder`."""
    for left in folder.glob(".*.partial"):
        if left.is_dir():
            shutil.rmtree(left)
