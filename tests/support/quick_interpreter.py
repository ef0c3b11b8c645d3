"""Faster Triton interpreter for tests: remember which members of triton.language are builtins.

Before a kernel, and before each function that a kernel calls, the interpreter searches every member of triton.language
for builtins and replaces them: two fifths of the time of these tests. The list of builtins does not change.
"""

from __future__ import annotations

import inspect

from triton.language import core
from triton.runtime import interpreter


def remember_builtins() -> None:
    names: dict[object, list[str]] = {}

    def patch(package: object, builder: object, scope: object) -> None:
        if package not in names:
            names[package] = [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]
        for name in names[package]:
            member = getattr(package, name)
            if core.is_builtin(member):  # otherwise the calling kernel has replaced it already
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch
