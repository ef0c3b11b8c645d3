"""Triton's interpreter, told once what it otherwise finds out again at each call of a device function.

Before a kernel, and before each function that a kernel calls, it goes through every member of triton.language to find
those that take a builder, and puts others in their place: two fifths of the time of these tests. Which members these
are does not change.
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
            if core.is_builtin(member):  # or it has been replaced by the kernel around this function
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch
