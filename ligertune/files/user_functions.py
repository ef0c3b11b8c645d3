"""Functions of a user's Python file, which recipe keys name as file.py:function. The file is executed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ligertune.errors import UserError, message_of


def load_function(name: str, *, key: str) -> Callable[..., Any]:
    """Return the function that "file.py:function" names: the file is executed.

    key: what messages name. Raises UserError if there is no such file or function, or if the file raises.
    """
    file, _, function = name.rpartition(":")
    path = Path(file).expanduser()
    if not path.is_file():
        raise UserError(f"{key}: there is no file {file}.", hint="Give the path of a Python file.")
    spec = importlib.util.spec_from_file_location(f"ligertune_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # of a file that ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look for it there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # of a user's code
        raise UserError(f"{key}: {file} raised {type(error).__name__}: {message_of(error)}.") from error
    found: Callable[..., Any] | None = getattr(module, function, None)
    if found is None or not callable(found):
        raise UserError(f"{key}: {file} has no function {function}.", hint="Name one that it defines.")
    return found
