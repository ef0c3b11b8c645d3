"""Where the kernels of a patched model may write over what they read, and that training is then the same.

The reference path makes new tensors, so on a machine without a GPU this file runs once more under Triton's interpreter.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
from unittest import mock

import peft
import pytest
import tiny_models
import torch
from ligertune_kernels import backend
from same_training import assert_same_training
from torch import nn

from ligertune.patching import patch as patch_module
from ligertune.patching import rope_patch as rope_module
from ligertune.patching.aliasing import gives_memory_of_its_own, sources_of
from ligertune.patching.patch import patch
from ligertune.patching.rope_patch import is_rotary, recognise_rope

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RUNS_TRITON = backend(DEVICE) == "triton"
NORMED = ("q_proj", "q_norm", "k_proj", "k_norm")
SOURCES = {"llama": ("q_proj", "k_proj"), "gemma2": ("q_proj", "k_proj"), "qwen3": NORMED, "olmo2": NORMED, "phi3": ()}


@pytest.mark.parametrize("family", SOURCES)
def test_the_sources_of_queries_and_keys_are_read_from_the_forward(family):
    attention = next(filter(is_rotary, tiny_models.make(family).modules()))
    ((function, _),) = recognise_rope(attention).functions
    assert sources_of(type(attention).forward, function) == SOURCES[family]


def rotate(q, k, *rest):
    return q, k


class Attention:
    """Forwards in which somebody else may read q or k, or where they come from elsewhere. They are parsed, not run."""

    def key_is_the_value_too(self, x, cos, sin):
        q, k = self.q_proj(x), self.k_proj(x)
        v = k
        q, k = rotate(q, k, cos, sin)
        return q, k, v

    def value_of_the_key(self, x, cos, sin):
        q = self.q_proj(x)
        k = self.k_proj(x)
        v = k
        q, k = rotate(q, k, cos, sin)
        return q, k, v

    def unrotated_query_kept(self, x, cos, sin):
        q = self.q_proj(x)
        k = self.k_proj(x)
        turned, k = rotate(q, k, cos, sin)
        return turned, k, q

    def query_without_a_projection(self, x, cos, sin):
        q = x.view(1, 2, 3)
        k = self.k_proj(x)
        q, k = rotate(q, k, cos, sin)
        return q, k

    def query_from_the_caller(self, q, x, cos, sin):
        if x is not None:
            q = self.q_proj(x)
        k = self.k_proj(x)
        q, k = rotate(q, k, cos, sin)
        return q, k

    def twice(self, x, cos, sin):
        q = self.q_proj(x)
        k = self.k_proj(x)
        for _ in range(2):
            q, k = rotate(q, k, cos, sin)
        return q, k

    def seen_by_a_gate(self, x, cos, sin):
        q = self.q_proj(x)
        k = self.k_proj(x)
        gate = self.gate(q)
        q, k = rotate(q, k, cos, sin)
        return q, k, gate

    def cut_out(self, x, cos, sin):
        q = self.qkv_proj(x)[..., :8]
        k = self.qkv_proj(x)[..., 8:]
        q, k = rotate(q, k, cos, sin)
        return q, k


@pytest.mark.parametrize("name", [name for name in vars(Attention) if not name.startswith("_")])
def test_a_forward_that_may_read_them_elsewhere_has_no_sources(name):
    assert sources_of(getattr(Attention, name), "rotate") == ()


def test_only_plain_layers_that_nobody_watches_give_memory_of_their_own():
    def linear():
        return nn.Linear(2, 2)

    watched, replaced, parametrized = linear(), linear(), linear()
    watched.register_forward_hook(lambda *_: None)
    replaced.forward = replaced.forward  # as accelerate's hooks do
    nn.utils.parametrizations.weight_norm(parametrized)
    assert gives_memory_of_its_own([linear(), linear()])
    for other in (None, nn.Identity(), nn.Dropout(), nn.LayerNorm(2), watched, replaced, parametrized):
        assert not gives_memory_of_its_own([linear(), other])
    with mock.patch.object(nn.modules.module, "_has_any_global_hook", lambda: True):
        assert not gives_memory_of_its_own([linear()])


def asked_in_place(model) -> dict[str, set[bool]]:
    """What a training step lets the kernels do, by op."""
    asked: dict[str, set[bool]] = {}

    def spy(op, name):
        def call(*args, inplace=False, **kwargs):
            asked.setdefault(name, set()).add(inplace)
            return op(*args, inplace=inplace, **kwargs)

        return call

    with (
        mock.patch.object(rope_module, "apply_rope", spy(rope_module.apply_rope, "rope")),
        mock.patch.object(patch_module, "swiglu", spy(patch_module.swiglu, "mlp")),
        mock.patch.object(patch_module, "geglu", spy(patch_module.geglu, "mlp")),
    ):
        model(**tiny_models.batch(rows=2, length=6, device=DEVICE)).loss.backward()
    return asked


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3"])
def test_a_patched_model_overwrites_what_its_own_layers_gave(family):
    model = tiny_models.make(family).to(DEVICE)
    patch(model)
    assert asked_in_place(model) == {"rope": {family != "phi3"}, "mlp": {True}}  # Phi 3 cuts q and k out of one tensor


def test_adapters_and_hooks_keep_what_they_read():
    model = tiny_models.make("llama").to(DEVICE)
    patch(model)
    for layer in model.model.layers:
        layer.mlp.up_proj.register_forward_hook(lambda *_: None)
    assert asked_in_place(model) == {"rope": {True}, "mlp": {False}}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["k_proj"]))
    assert asked_in_place(adapted) == {"rope": {False}, "mlp": {False}}


@pytest.mark.parametrize(
    ("family", "checkpointing"),
    [("llama", False), ("llama", True), ("qwen3", False), ("gemma2", False), ("phi3", False)],
)
def test_training_in_place_is_the_same(family, checkpointing):
    """Against the same kernels where they make new tensors, since a hook might look at what they read."""
    model = tiny_models.make(family).to(DEVICE)
    patch(model, loss="torch")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    apart = copy.deepcopy(model)
    for layer in apart.modules():
        if type(layer) is nn.Linear:
            layer.register_forward_hook(lambda *_: None)
    assert_same_training(model, apart, tiny_models.batch(rows=2, length=6, device=DEVICE))


@pytest.mark.skipif(RUNS_TRITON, reason="the kernels run here already")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_in_place_under_the_interpreter():
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1", "LIGERTUNE_EXPECT_BACKEND": "triton"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout + run.stderr
