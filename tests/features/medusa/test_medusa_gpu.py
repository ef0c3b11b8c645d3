"""Medusa on a GPU: heads trained with the Triton kernels, and text that equals plain decoding up to ties."""

import pytest
import torch
from support.tasks.medusa_runs import plan_medusa, train_medusa
from transformers import AutoModelForCausalLM

from ligertune.decode.speculative.candidate_tree import CandidateTree
from ligertune.decode.speculative.plain_decoding import prompt_token_ids
from ligertune.features.medusa.decode.tree_decoding import decode_with_heads
from ligertune.features.medusa.heads_files import read_choices, read_heads
from ligertune.features.output_head import logit_transform
from ligertune.run import run

pytestmark = pytest.mark.gpu

# Largest distance of a token's logit from the best one in bf16: two bf16 steps at logits of 8 to 16.
GAP = 0.125
NEW = 100


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(folder of heads trained in float32 for 150 steps, report, the job's held-out examples)."""
    folder = tmp_path_factory.mktemp("gpu") / "run"
    job = plan_medusa(folder, **{"train.max_steps": 150, "model.dtype": "float32"})
    return folder / "medusa", run(job, lambda line: None).as_dict(), job.data.eval


def test_heads_learn_and_write_plain_text_in_float32(trained):
    _, report, _ = trained
    found = report["medusa"]["decoding"]
    assert report["kernels_backend"] == "triton"
    assert found["identical"] == found["prompts"] and found["accepted_length"] >= 1.8


def test_bfloat16_text_is_plain_up_to_ties(trained, quickstart):
    """Each token's logit is at most GAP below the best one when the whole text is read at once."""
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
    settings = {
        "train.max_steps": 5,
        "train.learning_rate": 1e-4,
        "logging.logging_steps": 1,
        "medusa.eval_prompts": 0,
        "medusa.stage": stage,
        **changes,
        "medusa.heads_path": trained[0],
        "model.dtype": "bfloat16",
    }
    found = [train_medusa(tmp_path / str(on), **settings, **{"kernels.enabled": on})[0] for on in (True, False)]
    assert found[0] == pytest.approx(found[1], rel=1e-2)
