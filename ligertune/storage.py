"""A disk that is full, read-only or gone while something is written: one sentence instead of a traceback."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from ligertune.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


@contextlib.contextmanager
def writing(what: str) -> Iterator[None]:
    """Around what writes through torch or safetensors, which hide the system's error in ones of their own."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as problem:
        reason = reason_of(problem)
        if reason is None:
            raise
        raise cannot_write(what, reason) from problem


def reason_of(problem: BaseException) -> str | None:
    """What the disk refused, if it was the disk."""
    if isinstance(problem, OSError):
        return os.strerror(problem.errno) if problem.errno in FULL else None
    said = str(problem)
    if "inline_container" in said:  # torch.save: it says where its file ended, and not why
        return "the file could not be written to its end"
    return next((os.strerror(code) for code in FULL if f"(os error {code})" in said), None)


def cannot_write(what: str, reason: str) -> UserError:
    return UserError(
        f"{what} could not be written: {reason}.",
        hint="Make room (`ligertune doctor` shows the free disk), then continue with --resume from the newest complete "
        "checkpoint.",
        exit_code=1,
    )
