"""Modalities are found by their folders: a new one needs no change elsewhere."""

import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from ligertune.data import modalities
from ligertune.data.modalities.modality import Modality, has_sign, known_modalities, mark_of, marked_parts, modality_of
from ligertune.recipe import Recipe
from ligertune.recipe.feature import modality_parts

SPEC = """
from ligertune.data.modalities.modality import Modality


class SoundModality(Modality):
    is_text = False
    inputs = "sounds"

    @classmethod
    def reads(cls, config):
        return hasattr(config, "sound_config")


MODALITY = SoundModality
"""
RECIPE = """
from ligertune.recipe.feature import RecipePart
from ligertune.recipe.section import Section


class SoundSpec(Section):
    rate: int = 16_000


PART = RecipePart(sections={"sound": SoundSpec})
"""


@pytest.fixture
def sound(tmp_path, monkeypatch):
    """A second modality, in a folder of its own."""
    folder = tmp_path / "sound"
    folder.mkdir()
    for name, text in (("__init__", ""), ("spec", SPEC), ("recipe", RECIPE)):
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(modalities, "__path__", [*modalities.__path__, str(tmp_path)])
    for found in (known_modalities, modality_parts):
        found.cache_clear()
    yield
    for found in (known_modalities, modality_parts):
        found.cache_clear()
    for name in [name for name in sys.modules if name.startswith("ligertune.data.modalities.sound")]:
        del sys.modules[name]


def test_a_text_model_reads_nothing_else():
    modality = modality_of(LlamaConfig())
    positions = torch.arange(3)[None]
    assert type(modality) is Modality and modality.is_text and modality.facts.reads_text_only
    assert modality.in_language_model("model.layers.0.mlp.up_proj.weight")
    assert modality.text_positions(positions) is positions
    assert modality.load_reader(None, None, None) is None and modality.tower_shape(None) is None


def test_a_second_modality_is_a_second_folder(sound):
    assert modality_of(SimpleNamespace(sound_config={})).inputs == "sounds"
    assert modality_of(LlamaConfig()).is_text
    assert "sound" in {name for part in modality_parts() for name in part.sections}


def test_a_recipe_has_the_sections_of_all_modalities():
    for part in modality_parts():
        for name, kind in part.sections.items():
            assert type(Recipe.model_fields[name].default) is kind


def test_a_text_with_marks_becomes_parts():
    text = f"What is {mark_of(0)}this{mark_of(1)}"
    expected = [{"type": "text", "text": "What is "}, {"type": "sound"}, {"type": "text", "text": "this"}]
    assert marked_parts(text, "sound") == [*expected, {"type": "sound"}]
    assert marked_parts("", "sound") == [{"type": "text", "text": ""}]
    assert has_sign(text) and not has_sign("What is this?")
