"""What is imported stays: torch and transformers make half a million objects, hardly one of them garbage."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Where garbage is not looked for: not while modules are imported within, nor later among what they have made.

    The looking is a third of the time in which transformers is imported and the process ends. Where nothing new is
    imported, nothing is done.
    """
    enabled, known = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > known:
            gc.freeze()
        if enabled:
            gc.enable()
