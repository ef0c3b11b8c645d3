"""Targets of other kinds: packed rows have the loss of single documents, and models without a state per token."""

import json
from pathlib import Path

import pytest
import torch
from support.command_line import losses, overrides
from support.models.tiny_families import save_tiny
from transformers import AutoTokenizer

from ligertune.errors import UserError
from ligertune.recipe import load_recipe
from ligertune.recipe.read import bundled
from ligertune.run import run
from ligertune.training.resolve import plan_for

LENGTHS = (9, 30, 17, 41)


def train(family: str, folder: Path, quickstart: Path, **changes: object) -> float:
    """Return the loss of one step of a draft head on four documents, for a tiny target of a family."""
    save_tiny(family, folder / "model")
    AutoTokenizer.from_pretrained(quickstart / "stories260K").save_pretrained(folder / "model")
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 100, (length,), generator=generator).tolist() for length in LENGTHS]
    lines = (json.dumps({"input_ids": row, "labels": row}) for row in rows)
    (folder / "data.jsonl").write_text("\n".join(lines))
    settings = {
        "model.model_name_or_path": folder / "model",
        "data.datasets": f"[{{path: {folder / 'data.jsonl'}}}]",
        "data.val_split": 0,
        "data.max_length": sum(LENGTHS),
        "draft.draft_vocab_size": 80,
        "draft.layer_ids": "[1, 2, 3]",
        "draft.steps": 3,
        "train.max_steps": 1,
        "eval.eval_strategy": "no",
        "logging.logging_steps": 1,
        "checkpoint.output_dir": folder / "run",
        "checkpoint.save_strategy": "no",
        **changes,
    }
    recipe = load_recipe(bundled("draft/stories260k.yaml"), overrides=overrides(settings)[1::2])
    run(plan_for(recipe), lambda line: None)
    (loss,) = losses(folder / "run")
    return loss


OTHERS = ("deepseek_v3", "falcon_h1", "gemma2", "gemma3_text", "nemotron_h", "olmoe", "qwen3_next", "qwen3_moe")


@pytest.mark.parametrize(
    "family", ["qwen3_5_text", "hunyuan_v1_moe", *(pytest.param(family, marks=pytest.mark.slow) for family in OTHERS)]
)
def test_packed_rows_have_the_loss_of_single_documents(family, tmp_path, quickstart) -> None:
    found = []
    for packing, rows in ((True, 1), (False, len(LENGTHS))):
        folder = tmp_path / str(packing)
        folder.mkdir()
        batch = {"train.per_device_train_batch_size": rows, "train.global_batch_size": rows}
        found.append(train(family, folder, quickstart, **{"data.packing": packing, **batch}))
    assert found[0] == pytest.approx(found[1], rel=3e-5)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("gemma3n_text", r"reads states of shape \(4, 1, 2, 64\) for 2 tokens, and a draft head one vector of 64"),
        ("mamba2", "A mamba2 model has no attention heads"),
    ],
)
def test_models_that_no_head_fits_are_refused_in_a_sentence(family, message, tmp_path, quickstart) -> None:
    with pytest.raises(UserError, match=message) as caught:
        train(family, tmp_path, quickstart, **{"data.packing": False})
    assert caught.value.exit_code == 2
