"""Medusa on a GPU: heads trained through the Triton kernels, and text that is plain decoding's up to ties."""

from __future__ import annotations

import pytest
import torch
from command_line import losses, overrides
from transformers import AutoModelForCausalLM

from ligertune.decode.medusa_report import prompt_token_ids
from ligertune.decode.tree_decoding import decode_with_heads
from ligertune.recipe import load_recipe
from ligertune.recipe.read import bundled
from ligertune.run import plan_for, run
from ligertune.tasks.medusa.candidate_tree import CandidateTree
from ligertune.tasks.medusa.heads_files import read_choices, read_heads
from ligertune.tasks.medusa.output_head import logit_transform

pytestmark = pytest.mark.gpu

# How far below the best logit a token of bf16 decoding may be: two steps of bf16 at the logits' size, 8 to 16.
GAP = 0.125
NEW = 100


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(folder of heads trained in float32 for 150 steps, report, the job's held-out examples)."""
    folder = tmp_path_factory.mktemp("gpu") / "run"
    settings = {"train.max_steps": 150, "model.dtype": "float32", "checkpoint.output_dir": folder}
    job = plan_for(load_recipe(bundled("medusa/stories260k.yaml"), overrides=overrides(settings)[1::2]))
    return folder / "medusa", run(job, lambda line: None).as_dict(), job.data.eval


def test_heads_learn_and_write_plain_text_in_float32(trained):
    _, report, _ = trained
    found = report["medusa"]["decoding"]
    assert report["kernels_backend"] == "triton"
    assert found["identical"] == found["prompts"] and found["accepted_length"] >= 1.8


def test_bfloat16_text_is_plain_up_to_ties(trained, quickstart):
    """Each token is at most GAP below the likeliest, where the whole text is read at once."""
    folder, _, held_out = trained
    model = AutoModelForCausalLM.from_pretrained(quickstart / "stories260K", dtype=torch.bfloat16).cuda().eval()
    heads, form = read_heads(folder, model.get_output_embeddings().weight), logit_transform(model)
    tree = CandidateTree.from_paths(read_choices(folder, len(heads)), device="cuda")
    for i in range(4):
        prompt = prompt_token_ids(held_out[i].input_ids, held_out[i].labels)
        found = decode_with_heads(model, heads, form, [prompt], tree, max_new_tokens=NEW)
        text = torch.tensor([prompt + found.tokens[0]], device="cuda")
        with torch.no_grad():
            logits = model(text).logits[0, len(prompt) - 1 : -1].float()
        written = logits.gather(1, text[0, len(prompt) :, None]).squeeze(1)
        assert float((logits.amax(-1) - written).max()) <= GAP
        assert found.accepted_length > 1.5


@pytest.mark.parametrize(
    ("stage", "changes"),
    [(1, {}), (2, {}), (2, {"method.type": "lora"}), (2, {"medusa.self_distillation": True})],
    ids=["heads", "whole", "adapter", "distilled"],
)
def test_kernels_and_plain_torch_give_the_same_losses_in_bfloat16(trained, stage, changes, tmp_path):
    found = []
    for enabled in (True, False):
        settings = {
            "train.max_steps": 5,
            "train.learning_rate": 1e-4,
            "logging.logging_steps": 1,
            "medusa.eval_prompts": 0,
            "medusa.stage": stage,
            **changes,
            "medusa.heads_path": trained[0],
            "model.dtype": "bfloat16",
            "kernels.enabled": enabled,
            "checkpoint.output_dir": tmp_path / str(enabled),
        }
        run(plan_for(load_recipe(bundled("medusa/stories260k.yaml"), overrides=overrides(settings)[1::2])), print)
        found.append(losses(tmp_path / str(enabled)))
    assert found[0] == pytest.approx(found[1], rel=1e-2)
