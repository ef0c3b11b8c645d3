"""Chat templates by name, such as `data.prompt_template: chatml`: the published formats, as Jinja files in `chat/`.

The files were written for ligertune after the formats' descriptions, and have its licence (Apache-2.0). They have no
place for tools, and refuse rows with tools.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from ligertune.data.templates.bounded_jinja import read_template_file

_FOLDER = Path(__file__).parent / "chat"
NAMES = tuple(sorted(path.name.removesuffix(".jinja") for path in _FOLDER.glob("*.jinja")))


def read_template(name: str) -> str:
    """Return the text of a built-in template or, for any other name, of a file. Raises OSError or UnicodeError."""
    return read_template_file(template_path(name))


def template_path(name: str) -> Path:
    """Return the file of a built-in template, or `name` as a path. The recipe has made paths of files absolute."""
    return _FOLDER / f"{name}.jinja" if name in NAMES else Path(name)


def known_templates(name: str) -> str:
    """Return a sentence that names the built-in templates, or the one that `name` is a misspelling of."""
    close = get_close_matches(name.lower(), NAMES, n=1)
    return f"Did you mean {close[0]}?" if close else f"The built-in ones are {', '.join(NAMES)}."
