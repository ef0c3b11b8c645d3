"""Fixtures of the tests of model folders."""

import logging
import shutil

import pytest
from support.models.hostile_folders import RECIPE


@pytest.fixture
def place(tmp_path, quickstart, monkeypatch):
    """The working directory, with a good model folder, data and a recipe."""
    monkeypatch.setattr(logging, "raiseExceptions", False)  # transformers' logger keeps the stderr of an earlier test
    shutil.copytree(quickstart / "stories260K", tmp_path / "model")
    (tmp_path / "d.jsonl").write_text('{"instruction": "Say hello.", "output": "Hello."}\n' * 8)
    (tmp_path / "r.yaml").write_text(RECIPE)
    return tmp_path
