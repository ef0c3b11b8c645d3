"""How much memory the host has, and how much of it is to be had, within the limit of a container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
# both versions of control groups: folder, limit, what is taken
GROUPS = (
    ("", "memory.max", "memory.current"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def available_memory(proc: Path = PROC, cgroup: Path = CGROUP) -> int | None:
    """Bytes that could be had without swapping; None where the system does not say."""
    available = _table(proc / "meminfo").get("MemAvailable:")
    if available is None:
        return None
    return min([1024 * available, *(max(0, limit - taken) for limit, taken in _limits(cgroup))])


def total_memory(cgroup: Path = CGROUP) -> int:
    """Bytes of all that processes may take together; 0 where the system does not say."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", ()):
        return 0
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(limit for limit, _ in _limits(cgroup))])


def _limits(cgroup: Path) -> Iterator[tuple[int, int]]:
    """Limits in bytes, and what is taken of each beside files, which are read again where their memory is wanted."""
    for folder, limit, taken in GROUPS:
        most, held = (_number(cgroup / folder / name) for name in (limit, taken))
        if most is not None and held is not None:
            files = _table(cgroup / folder / "memory.stat")
            yield most, held - files.get("active_file", 0) - files.get("inactive_file", 0)


def _table(path: Path) -> dict[str, int]:
    """Lines of a word and a number."""
    try:
        lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def _number(path: Path) -> int | None:
    """What a file holds; None for one that is not there, or holds a word (`max`)."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
