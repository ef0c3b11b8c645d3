"""The same parity on a GPU, where the kernels themselves run. Sizes are odd on purpose: 37 tokens, 3 rows."""

from __future__ import annotations

import copy

import pytest
import tiny_models
import torch
from same_training import assert_same_training, losses_and_gradients, relative_error

from ligertune.models.load import build_model
from ligertune.patching.patch import patch
from ligertune.planning.options import ModelOptions

pytestmark = pytest.mark.gpu
FAMILIES = ("llama", "gemma2", "mixtral")
FP32 = 3e-5  # of the largest gradient: atomics of torch's own backward move it by 1e-5 from run to run


def pair(family, dtype=torch.float32):
    plain = tiny_models.make(family).to("cuda", dtype)
    patched = copy.deepcopy(plain)
    assert patch(patched).backend == "triton"
    return patched, plain


@pytest.mark.parametrize("counted", [None, 31])
@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_gradients_equal_the_unpatched_ones(family, counted):
    options = {} if counted is None else {"num_items_in_batch": counted}
    batch = tiny_models.batch(rows=3, length=37, device="cuda")
    assert_same_training(*pair(family), batch, tolerance=FP32, **options)


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16 weights", "autocast"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_close_to_fp32_as_without_kernels(family, autocast):
    batch = tiny_models.batch(rows=3, length=37, device="cuda")
    patched, plain = pair(family)
    loss, truth = losses_and_gradients(plain, batch)
    off, errors = [], []
    for model in (patched, plain):
        model = model if autocast else model.bfloat16()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            ours, gradients = losses_and_gradients(model, batch)
        off.append((ours - loss).abs() / loss)
        errors.append(relative_error(gradients, truth))
    assert errors[0] <= 1.1 * errors[1] + 1e-3
    assert off[0] <= off[1] + 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_gives_the_same_tokens(family):
    patched, plain = (model.eval() for model in pair(family))
    patched.config.output_router_logits = plain.config.output_router_logits = False
    prompt = tiny_models.batch(device="cuda")["input_ids"][:, :6]
    settings = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    assert torch.equal(patched.generate(prompt, **settings), plain.generate(prompt, **settings))


def test_compiles_without_a_graph_break():
    patched, _ = pair("llama", torch.bfloat16)
    batch = tiny_models.batch(rows=3, length=37, device="cuda")
    expected = patched(**batch).loss
    loss = torch.compile(patched, fullgraph=True)(**batch).loss
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=0)


def test_random_weights_are_made_on_the_gpu_and_follow_the_seed():
    spec = ModelOptions(model_name_or_path="unused", init="random")
    before = torch.cuda.get_rng_state()
    states = [
        build_model(spec, tiny_models.config_of("llama"), dtype=torch.bfloat16, device="cuda", seed=seed).state_dict()
        for seed in (1, 1, 2)
    ]
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert all(value.device.type == "cuda" for value in states[0].values())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["lm_head.weight"], states[2]["lm_head.weight"])
