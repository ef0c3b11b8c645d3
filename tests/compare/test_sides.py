"""Sides that the options choose, the settings of a sweep, and the recipe of a trial."""

from importlib.util import find_spec

import pytest
from typer.testing import CliRunner

from ligertune.cli.app import app
from ligertune.compare import comparison
from ligertune.compare.compare_files import COLOURS
from ligertune.compare.comparison import kernels_in_use
from ligertune.compare.side import SIDE_OF, SIDES, check_losses, choose_sides
from ligertune.compare.trial import Failure, Trial, TrialOptions, trial_recipe
from ligertune.errors import UserError

NEEDS_TORCHAO = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
CHOICES = [
    ({}, ["with", "without"]),
    ({"only": "without"}, ["without"]),
    ({"ablate": ["norm", "loss"]}, ["with", "no-norm", "no-fused-loss", "without"]),
    ({"ablate": ["mlp"], "baselines": ["compile"]}, ["with", "no-mlp", "without", "compile"]),
    ({"baselines": ["with-fp8"]}, ["with", "with-fp8"]),
    pytest.param({"baselines": ["with-torchao"]}, ["with", "with-torchao"], marks=NEEDS_TORCHAO),
    (
        {"baselines": ["hf", "with-offload-gate", "with-rebuild", "with-recompute-norms"]},  # an old name, a new one
        ["with", "with-recompute", "with-recompute-norms", "with-offload-gate", "without"],
    ),
    ({"baselines": ["hf-chunked", "with-compile"]}, ["with", "with-compile", "hf-chunked"]),
]


@pytest.fixture
def settings(quickstart):
    """settings(sweep, *overrides): the loaded settings of the quickstart recipe."""
    return lambda sweep=None, *overrides: comparison.load_settings(quickstart / "stories260k.yaml", overrides, sweep)


@pytest.mark.parametrize(("options", "names"), CHOICES, ids=str)
def test_options_choose_sides(options, names):
    assert [side.name for side in choose_sides(**options)] == names


@pytest.mark.parametrize(
    ("options", "word"), [({"baselines": ["eager"]}, "hf-chunked"), ({"peers": ["axolotl"]}, "liger")], ids=str
)
def test_an_unknown_side_is_refused_with_the_known_ones(options, word):
    with pytest.raises(UserError, match=word):
        choose_sides(**options)


@pytest.mark.parametrize(
    "side", [side for side in SIDES if side.name in ("hf-chunked", "liger")], ids=lambda side: side.name
)
def test_a_side_that_only_has_the_cross_entropy_is_refused_for_other_losses(side):
    with pytest.raises(UserError, match=f"{side.name}: its loss is the cross-entropy of the labels.* task is dpo"):
        check_losses([SIDES[0], side], "dpo")
    check_losses(SIDES, "sft")


@pytest.mark.parametrize(
    ("overrides", "arch", "expected"),
    [
        ([], "x86_64", ["rope", "norm", "mlp", "loss"]),
        # where auto takes the kernels
        ([], "sm90", ["rope", "norm", "mlp", "loss", "attention", "optimizer"]),
        (["method.type=lora"], "sm90", ["rope", "norm", "mlp", "loss", "attention", "lora"]),
        (
            ["kernels.rope=false", "kernels.loss=torch", "kernels.optimizer=true"],
            "gfx942",
            ["norm", "mlp", "optimizer"],
        ),
    ],
)
def test_each_kernel_that_the_recipe_uses_is_removed_once(overrides, arch, expected, settings):
    recipe = settings(None, *overrides)[0].recipe
    assert list(kernels_in_use(recipe, arch)) == expected
    for side in choose_sides(ablate=expected):
        if side.removes:
            (changed,) = side.kernels.keys() - {"enabled"}
            assert changed == side.removes and side.ours


def test_a_sweep_changes_only_its_key(settings):
    swept = settings("length=128, 256", "train.seed=7")
    assert [setting.label for setting in swept] == ["length 128", "length 256"]
    assert [setting.recipe.data.max_length for setting in swept] == [128, 256]
    assert {setting.recipe.train.seed for setting in swept} == {7}


@pytest.mark.parametrize("sweep", ["depth=1,2", "batch", "batch=", "batch=none"])
def test_an_invalid_sweep_is_refused(sweep, settings):
    with pytest.raises(UserError, match=r"--sweep|train\.per_device_train_batch_size"):
        settings(sweep)


def test_a_side_changes_the_recipe_and_other_libraries_pad(settings, tmp_path):
    """data.padding_free stays on with our kernels; without them, or compiled, batches are padded."""
    recipe = settings(None, "data.padding_free=true")[0].recipe
    made = {name: trial_recipe(recipe, side, 5, tmp_path) for name, side in SIDE_OF.items()}
    assert all(one.train.max_steps == 5 and one.checkpoint.output_dir == str(tmp_path) for one in made.values())
    float8 = [made[name].train for name in ("with", "with-fp8", "with-torchao")]
    assert [(train.fp8, train.torch_compile) for train in float8] == [(False, False), (True, False), ("torchao", True)]
    unpadded = {name for name, one in made.items() if one.data.padding_free is True}
    ablated = {name for name in SIDE_OF if name.startswith("no-")}
    assert unpadded == ablated | {"with", "with-recompute", "with-recompute-norms", "with-recompute-mlps",
                        "with-attention", "with-lora", "with-fp8",
                        "with-offload", "with-offload-gate", "with-offload-both"}  # fmt: skip
    assert all(made[name].data.padding_free is False for name in made.keys() - unpadded)


def test_other_libraries_recompute_whole_layers(settings, tmp_path):
    recipe = settings(None, "train.gradient_checkpointing=offload_gate")[0].recipe
    names = ("with", "no-rope", "no-mlp", "without", "liger")
    made = [trial_recipe(recipe, SIDE_OF[name], 5, tmp_path).train for name in names]
    assert [train.gradient_checkpointing for train in made] == ["offload_gate", "offload_gate", True, True, True]
    recipe = settings(None, "train.gradient_checkpointing=offload")[0].recipe
    assert trial_recipe(recipe, SIDE_OF["without"], 5, tmp_path).train.gradient_checkpointing == "offload"


@pytest.mark.skipif(find_spec("torchao") is not None, reason="torchao is installed")
def test_float8_without_torchao_is_refused_with_the_package_to_install():
    with pytest.raises(UserError, match="--baseline with-torchao: torchao is not installed"):
        choose_sides(baselines=["with-torchao"])


def test_every_second_repeat_runs_the_sides_in_reverse_and_failed_ones_no_more(settings, monkeypatch, tmp_path):
    ran = []

    def run_trial(recipe, side, repeat, options, folder):
        ran.append(f"{side.name} {repeat}")
        failure = Failure("error", "") if side.name == "liger" else None
        return Trial(side.name, repeat, 0, (), {"throughput": None}, failure)

    monkeypatch.setattr(comparison, "run_trial", run_trial)
    monkeypatch.setattr(comparison, "summarise_trials", lambda trials, **named: None)
    sides = [SIDE_OF[name] for name in ("with", "liger", "without")]
    comparison.compare(settings(), sides, TrialOptions(3, 1, 1, tmp_path), target={}, show=str)
    assert ran == ["with 1", "liger 1", "without 1", "without 2", "with 2", "with 3", "without 3"]


def test_the_command_chooses_sides_repeats_and_steps(monkeypatch):
    def compare(settings, sides, options, **named):
        raise UserError(f"{[side.name for side in sides]} {options.repeats} {options.steps}")

    monkeypatch.setattr(comparison, "compare", compare)
    target = {"vendor": "cpu", "name": "a CPU", "arch": "x86_64"}
    monkeypatch.setattr("ligertune.compare.trial.read_target", lambda: target)
    words = ["--without", "--repeats", "2", "--steps", "5"]
    for given, expected in ((["--with"], "['with'] 3 8"), (words, "['without'] 2 5")):
        assert str(CliRunner().invoke(app, ["compare", *given]).exception).startswith(expected)


def test_every_side_has_a_different_colour_in_charts():
    assert len(set(COLOURS.values())) == len(COLOURS) and COLOURS.keys() == SIDE_OF.keys()
