"""Checksums of a checkpoint's files: written with it, compared before it is resumed from.

CRC-32 finds what disks and copies do to files, at several GB a second; it is no defence against forgery.
"""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PIECE = 16 << 20


def checksums(folder: Path, *, but: str) -> dict[str, list[int]]:
    """Relative path -> [bytes, CRC-32] of every file in `folder` except the one called `but`."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != but)
    with ThreadPoolExecutor(max_workers=8) as pool:  # zlib lets other threads run
        found = pool.map(_checksum, paths)
        return {path.relative_to(folder).as_posix(): sums for path, sums in zip(paths, found, strict=True)}


def damage(folder: Path, expected: dict[str, list[int]], *, but: str) -> str | None:
    """What is wrong with a folder's files, in words; None where they are what was written."""
    missing = [name for name in expected if not (folder / name).is_file()]
    if missing:
        return f"{missing[0]} is missing"
    found = checksums(folder, but=but)
    for name, (size, crc) in expected.items():
        if found[name][0] != size:
            return f"{name} has {found[name][0]} bytes instead of {size}"
        if found[name][1] != crc:
            return f"{name} is not what was written (its checksum differs)"
    return None


def _checksum(path: Path) -> list[int]:
    size, crc = 0, 0
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            size, crc = size + len(piece), zlib.crc32(piece, crc)
    return [size, crc]
