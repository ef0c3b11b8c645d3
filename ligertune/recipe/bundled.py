"""The recipes that come with ligertune: in the wheel, or in a checkout."""

from __future__ import annotations

from pathlib import Path

from ligertune.errors import UserError


def bundled_recipes() -> list[Path]:
    """All of them, the quickstart first."""
    found = [path for path in sorted(_home().rglob("*.yaml")) if "\nmodel:" in path.read_text("utf-8")]
    return sorted(found, key=lambda path: path.parent.name != "quickstart")


def bundled(name: str) -> Path:
    """The recipe `name`, a path under configs/."""
    return _home() / name


def _home() -> Path:
    package = Path(__file__).parents[1]
    home = next((h for h in (package, package.parent) if (h / "configs" / "quickstart").is_dir()), None)
    if home is None:
        raise UserError("The bundled recipes are not installed.", hint="Install the wheel, or run in a checkout.")
    return home / "configs"


def what_it_is_for(path: Path) -> str:
    """Its first line, a comment."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""
