"""The two wheels of scripts/setup/build_wheels.py hold what the one of `pip install .` does, and fit each other."""

import sys

import pytest
from support.command_line import ROOT
from support.script_modules import script_module

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

WHOLE = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def whole() -> dict:
    return tomllib.loads(WHOLE)


def test_ligertune_requires_the_kernels_in_place_of_holding_them(whole):
    split = tomllib.loads(script_module("setup.build_wheels").without_kernels(WHOLE))
    version = whole["project"]["version"]
    assert split["project"]["dependencies"] == [f"ligertune-kernels=={version}", *whole["project"]["dependencies"]]
    names = split["tool"]["setuptools"]["packages"]
    left_out = set(whole["tool"]["setuptools"]["packages"]) - set(names)
    assert left_out and all(name.startswith("ligertune_kernels") for name in left_out)
    assert not any(name.startswith("ligertune_kernels") for name in names)
    assert split["tool"]["setuptools"]["package-dir"] == {"ligertune.configs": "configs"}
    assert "ligertune_kernels" not in split["tool"]["setuptools"]["package-data"]


def test_the_kernels_have_the_version_python_and_torch_of_ligertune(whole):
    kernels = tomllib.loads((ROOT / "kernels" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for key in ("version", "requires-python", "license"):
        assert kernels[key] == whole["project"][key]
    (torch,) = kernels["dependencies"]
    assert torch in whole["project"]["dependencies"]
