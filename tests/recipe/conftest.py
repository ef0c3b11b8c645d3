"""Fixtures that write a recipe to an empty current folder, so that complaints name it `recipe.yaml`."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ligertune.errors import UserError
from ligertune.recipe import Recipe, load_recipe

REQUIRED = """\
model: {model_name_or_path: some/model}
data: {datasets: [{path: some/data}]}
checkpoint: {output_dir: runs/one}
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recipe]:
    """load(text, *overrides): the recipe that is read from this text."""
    monkeypatch.chdir(tmp_path)

    def load(text: str | bytes, *overrides: str) -> Recipe:
        Path("recipe.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
        return load_recipe(Path("recipe.yaml"), overrides)

    return load


@pytest.fixture
def complaints(load: Callable[..., Recipe]) -> Callable[..., list[str]]:
    """complaints(text, *overrides): the lines of the UserError."""

    def complaints(text: str | bytes, *overrides: str) -> list[str]:
        with pytest.raises(UserError) as problem:
            load(text, *overrides)
        assert problem.value.exit_code == 2
        return str(problem.value).splitlines()

    return complaints


@pytest.fixture
def required() -> str:
    """The three required keys, on lines 1 to 3; tests append more lines."""
    return REQUIRED
