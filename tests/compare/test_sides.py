"""Which sides the options choose, and what a sweep makes of the recipe."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from ligertune.compare.compare_plots import COLOURS
from ligertune.compare.comparison import settings_of
from ligertune.compare.side import SIDE_OF, choose_sides
from ligertune.compare.trial import trial_recipe
from ligertune.errors import UserError

NEEDS_TORCHAO = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
CHOICES = [
    ({}, ["with", "without"]),
    ({"only": "without"}, ["without"]),
    ({"ablate": True}, ["with", "no-fused-loss", "without"]),
    ({"ablate": True, "baselines": ["compile"]}, ["with", "no-fused-loss", "without", "compile"]),
    pytest.param(
        {"baselines": ["with-compile", "with-fp8"]}, ["with", "with-compile", "with-fp8"], marks=NEEDS_TORCHAO
    ),
    (
        {"baselines": ["hf", "with-offload-gate", "with-rebuild", "with-recompute-norms"]},  # an old name, a new one
        ["with", "with-recompute", "with-recompute-norms", "with-offload-gate", "without"],
    ),
    ({"baselines": ["hf-chunked", "with-compile"]}, ["with", "with-compile", "hf-chunked"]),
]


@pytest.mark.parametrize(("options", "names"), CHOICES, ids=str)
def test_the_sides_of_the_options(options, names):
    assert [side.name for side in choose_sides(**options)] == names


@pytest.mark.parametrize(
    ("options", "word"), [({"baselines": ["eager"]}, "hf-chunked"), ({"peers": ["axolotl"]}, "liger")], ids=str
)
def test_an_unknown_side_is_refused_with_the_known_ones(options, word):
    with pytest.raises(UserError, match=word):
        choose_sides(**options)


def test_a_sweep_moves_its_key_alone(quickstart):
    settings = settings_of(quickstart / "stories260k.yaml", ["train.seed=7"], "length=128, 256")
    assert [setting.label for setting in settings] == ["length 128", "length 256"]
    assert [setting.recipe.data.max_length for setting in settings] == [128, 256]
    assert {setting.recipe.train.seed for setting in settings} == {7}


@pytest.mark.parametrize("sweep", ["depth=1,2", "batch", "batch=", "batch=none"])
def test_what_is_no_sweep_is_refused(sweep, quickstart):
    with pytest.raises(UserError, match=r"--sweep|train\.per_device_train_batch_size"):
        settings_of(quickstart / "stories260k.yaml", [], sweep)


def test_a_side_says_what_trains_differently(quickstart, tmp_path):
    recipe = settings_of(quickstart / "stories260k.yaml", [], None)[0].recipe
    said = {name: trial_recipe(recipe, SIDE_OF[name], 5, tmp_path).train for name in ("with", "with-fp8")}
    assert [(train.fp8, train.torch_compile) for train in said.values()] == [(False, False), (True, True)]


def test_what_others_compute_is_padded_as_they_pad(quickstart, tmp_path):
    """With our kernels a recipe's word stands; without, or under a compiler, batches are rectangles."""
    recipe = settings_of(quickstart / "stories260k.yaml", ["data.padding_free=true"], None)[0].recipe
    said = {name: trial_recipe(recipe, side, 5, tmp_path).data.padding_free for name, side in SIDE_OF.items()}
    ours = {name for name, padding_free in said.items() if padding_free is True}
    assert ours == {"with", "no-fused-loss", "with-recompute", "with-recompute-norms", "with-attention", "with-lora",
                    "with-offload", "with-offload-gate", "with-offload-both"}  # fmt: skip
    assert all(said[name] is False for name in said.keys() - ours)


def test_others_run_whole_layers_again(quickstart, tmp_path):
    changes = ["train.gradient_checkpointing=offload_gate"]
    recipe = settings_of(quickstart / "stories260k.yaml", changes, None)[0].recipe
    said = {name: trial_recipe(recipe, SIDE_OF[name], 5, tmp_path).train for name in ("with", "without", "liger")}
    assert [train.gradient_checkpointing for train in said.values()] == ["offload_gate", True, True]
    recipe = settings_of(quickstart / "stories260k.yaml", ["train.gradient_checkpointing=offload"], None)[0].recipe
    assert trial_recipe(recipe, SIDE_OF["without"], 5, tmp_path).train.gradient_checkpointing == "offload"


@pytest.mark.skipif(find_spec("torchao") is not None, reason="torchao is installed")
def test_float8_without_torchao_is_refused_with_how_to_get_it():
    with pytest.raises(UserError, match="--baseline with-fp8: torchao is not installed"):
        choose_sides(baselines=["with-fp8"])


def test_every_side_has_a_colour_of_its_own_in_charts():
    assert len(set(COLOURS.values())) == len(COLOURS) and COLOURS.keys() == SIDE_OF.keys()
