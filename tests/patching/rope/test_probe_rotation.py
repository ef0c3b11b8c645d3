"""Rotary functions of real families are recognised by their numbers, and `apply_rope` gives those numbers."""

import importlib.util
import pkgutil
import re
from pathlib import Path

import pytest
import torch
import transformers.models
from torch import Tensor

from ligertune.patching.probe import Refusal
from ligertune.patching.rope.kernel_rope import ROTARY_FUNCTION
from ligertune.patching.rope.probe_rotation import recognise_rotation
from ligertune.patching.rope.rotation import HEADS_ARGUMENT, Form, rotary_function

QK, ONE = ("q", "k", "cos", "sin"), ("q", "cos", "sin")

# (family, function) -> (arguments, pairing, table, what else differs from Llama's): a match that is lost is noticed
EXPECTED = {
    ("llama", "apply_rotary_pos_emb"): (QK, "half", "column", {}),
    ("olmo2", "apply_rotary_pos_emb"): (QK, "half", "column", {"keeps_dtype": True}),
    ("phi3", "apply_rotary_pos_emb"): (QK, "half", "column", {"columns": "first"}),
    ("cohere2", "apply_rotary_pos_emb"): (QK, "pairs", "column", {"keeps_dtype": True}),
    ("glm4", "apply_rotary_pos_emb"): (QK, "pairs", "first half", {"columns": "first"}),
    ("glm4v", "apply_rotary_pos_emb"): (QK, "pairs", "column", {"columns": "first"}),
    ("qwen2_vl", "apply_rotary_pos_emb"): (QK, "half", "column", {}),
    ("qwen2_vl", "apply_rotary_pos_emb_vision"): (QK, "half", "column", {"keeps_dtype": True}),
    ("gpt_oss", "apply_rotary_pos_emb"): (QK, "half", "pair", {}),
    ("nanochat", "apply_rotary_pos_emb"): (QK, "half", "column", {"backwards": True}),
    ("qwen4_exp", "apply_rotary_pos_emb"): (QK, "half", "column", {"columns": "first", "alone": "tensor"}),
    ("gemma3n", "apply_rotary_pos_emb"): (ONE, "half", "column", {}),
    ("gemma4", "apply_rotary_pos_emb"): (ONE, "half", "column", {}),
    ("deepseek_v4", "apply_rotary_pos_emb"): (ONE, "pairs", "pair", {"columns": "last", "keeps_dtype": True}),
    ("gptj", "apply_rotary_pos_emb"): (("q", "sin", "cos"), "pairs", "pair", {}),
    ("codegen", "apply_rotary_pos_emb"): (("q", "sin", "cos"), "pairs", "pair", {}),
    ("llama4", "apply_rotary_emb"): (("q", "k", "complex"), "pairs", "complex", {"keeps_dtype": True}),
    ("llama4", "vision_apply_rotary_emb"): (("q", "k", "complex"), "pairs", "complex", {"keeps_dtype": True}),
    ("deepseek_v2", "apply_rotary_emb"): (("q", "k", "complex"), "pairs", "complex", {"keeps_dtype": True}),
    ("deepseek_v3", "apply_rotary_pos_emb_interleave"): (QK, "pairs to halves", "first half", {}),
    ("mistral_large4", "apply_rotary_pos_emb_interleave"): (QK, "pairs to halves", "first half", {"alone": "pair"}),
}
BY_DEFAULT = {"backwards": False, "columns": "all", "keeps_dtype": False, "alone": None}


def function_of(family, name):
    if importlib.util.find_spec(f"transformers.models.{family}") is None:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)


@pytest.mark.parametrize(("family", "name"), EXPECTED)
def test_a_rotary_function_is_recognised_and_computed_as_its_own(family, name):
    function = function_of(family, name)
    rotation = recognise_rotation(function)
    *form, others = EXPECTED[family, name]
    assert (rotation.arguments, rotation.pairing, rotation.table) == tuple(form)
    assert {key: getattr(rotation, key) for key in BY_DEFAULT} == BY_DEFAULT | others
    ours = rotary_function(function, rotation, otherwise=not_described)
    for form, axis in rotation.axes:
        arguments, options = call_of(rotation, form, axis)
        given, gradients = results(ours, arguments, rotation, options)
        expected, own = results(function, arguments, rotation, options)
        for one, other in zip([*given, *gradients], [*expected, *own], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
            assert one.dtype == other.dtype


def not_described(*args, **kwargs):
    raise AssertionError("the call went to the model's own function")


def call_of(rotation, form: Form, axis: int):
    """Return arguments with real angles: 7 tokens, 6 and 3 heads of 16 or 24 columns, of which 16 rotate."""
    torch.manual_seed(0)
    width = 16 if rotation.columns == "all" else 24
    q, k = (torch.randn((2, 7, heads, width) if axis == 2 else (2, heads, 7, width)) for heads in (6, 3))
    angles = torch.rand(2, 7, 8) * 6
    if rotation.table in ("column", "first half"):
        both = rotation.table == "column" and rotation.pairing == "pairs"
        angles = angles.repeat_interleave(2, -1) if both else torch.cat((angles, angles), -1)
    q, k = (q, k) if form.q_dims == 4 else (q[0], k[0])
    angles = angles if form.table_dims == 3 else angles[0]
    given = {"q": q, "k": k, "cos": angles.cos(), "sin": angles.sin()}
    given["complex"] = torch.complex(given["cos"], given["sin"])
    options = {} if form.heads_argument is None else {HEADS_ARGUMENT: form.heads_argument}
    return [given[name] for name in rotation.arguments], options


def results(function, arguments, rotation, options) -> tuple[list[Tensor], list[Tensor]]:
    """Return what a function gives, and the gradients of q and k."""
    named = list(zip(rotation.arguments, arguments, strict=True))
    leaves = [t.clone().requires_grad_() if name in ("q", "k") else t for name, t in named]
    output = function(*leaves, **options)
    outputs = list(output) if isinstance(output, tuple) else [output]
    loss = sum(t.float().pow(3).sum() for t in outputs)
    return outputs, list(torch.autograd.grad(loss, [t for t in leaves if t.requires_grad]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_k_the_result_has_the_form_of_the_original(dtype):
    """Qwen 4's indexer and Mistral Large 4's shared keys."""
    for family, name in (("qwen4_exp", "apply_rotary_pos_emb"), ("mistral_large4", "apply_rotary_pos_emb_interleave")):
        function = function_of(family, name)
        q, angles = torch.randn(2, 5, 4, 16, dtype=dtype), torch.randn(1, 5, 8).repeat(1, 1, 2)
        tables = {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype), "unsqueeze_dim": 2}
        ours = rotary_function(function, recognise_rotation(function), otherwise=not_described)
        given, expected = ours(q, None, **tables), function(q, None, **tables)
        pairs = [(given, expected)] if isinstance(expected, Tensor) else list(zip(given, expected, strict=True))
        slack = 1e-6 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(*pairs[0], rtol=slack, atol=slack)
        assert [two for two in pairs[1:] if two != (None, None)] == []


@pytest.mark.parametrize("name", ["llama", "olmo2"])
def test_tables_in_fp32_give_the_dtype_of_the_original(name):
    """GPT-J and CodeGen rotate in fp32 and go on in fp32."""
    function = function_of(name, "apply_rotary_pos_emb")
    ours = rotary_function(function, recognise_rotation(function), otherwise=not_described)
    q, k, angles = torch.randn(2, 4, 5, 8).bfloat16(), torch.randn(2, 2, 5, 8).bfloat16(), torch.randn(1, 5, 8)
    pairs = zip(ours(q, k, angles.cos(), angles.sin()), function(q, k, angles.cos(), angles.sin()), strict=True)
    for given, expected in pairs:
        assert given.dtype == expected.dtype == (torch.float32 if name == "llama" else torch.bfloat16)
        torch.testing.assert_close(given, expected, rtol=1e-2, atol=1e-2)
    on_meta = [t.to("meta") for t in (q, k, angles.cos(), angles.sin())]
    assert [t.dtype for t in ours(*on_meta)] == [t.dtype for t in function(*on_meta)]
    with torch.autocast("cpu", dtype=torch.bfloat16):  # attention then casts to bf16 in any case
        assert ours(q, k, angles.cos(), angles.sin())[0].dtype == torch.bfloat16


def half(x: Tensor) -> Tensor:
    one, two = x.chunk(2, dim=-1)
    return torch.cat((-two, one), dim=-1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos.unsqueeze(1) + half(x) * sin.unsqueeze(1)


def other_names(states_a, states_b, table_a, table_b):
    return rotated(states_a, table_a, table_b), rotated(states_b, table_a, table_b)


def with_positions(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    return other_names(q, k, cos, sin)


def other_default(q, k, cos, sin, unsqueeze_dim=2):
    return tuple(x * cos.unsqueeze(unsqueeze_dim) + half(x) * sin.unsqueeze(unsqueeze_dim) for x in (q, k))


@pytest.mark.parametrize("function", [other_names, with_positions, other_default])
def test_names_and_defaults_of_the_parameters_do_not_matter(function):
    rotation = recognise_rotation(function)
    assert (rotation.arguments, rotation.pairing, rotation.table) == (QK, "half", "column")
    x, angles = torch.randn(1, 5, 5, 8), torch.randn(1, 5, 4).repeat(1, 1, 2)
    ours = rotary_function(function, rotation, otherwise=not_described)
    calls = (one(x, x, angles.cos(), angles.sin()) for one in (ours, function))
    torch.testing.assert_close(*calls)


def key_as_it_was(q, k, cos, sin):
    return rotated(q, cos, sin), k


def key_backwards(q, k, cos, sin):
    return rotated(q, cos, sin), rotated(k, cos, -sin)


def key_first(q, k, cos, sin):
    return rotated(k, cos, sin), rotated(q, cos, sin)


def scaled(q, k, cos, sin):
    return 1.001 * rotated(q, cos, sin), rotated(k, cos, sin)


def tables_of_lo_and_hi_exchanged(q, k, cos, sin):
    return tuple(x * cos.unsqueeze(1) + half(x) * sin.roll(4, -1).unsqueeze(1) for x in (q, k))


def second_half_of_the_tables(q, k, cos, sin):
    cos, sin = (t[..., 4:].repeat(1, 1, 2) for t in (cos, sin))
    return rotated(q, cos, sin), rotated(k, cos, sin)


def halves_to_pairs(q, k, cos, sin):
    return tuple(rotated(x, cos, sin).unflatten(-1, (2, 4)).transpose(-1, -2).flatten(-2) for x in (q, k))


def one_sequence_only(q, k, cos, sin):
    return rotated(q, cos[:1], sin[:1]), rotated(k, cos[:1], sin[:1])


def rounded_twice(q, k, cos, sin):
    return tuple(rotated(x, cos, sin).to(torch.float8_e4m3fn).to(x.dtype) for x in (q, k))


def float_only(q, k, cos, sin):
    """Differ in bf16."""
    return tuple(rotated(x, cos, sin) * (1 if x.dtype == torch.float32 else 2) for x in (q, k))


def positions_needed(q, k, cos, sin, position_ids):
    return rotated(q, cos, sin), rotated(k, cos, sin)


def keywords(q, k, cos, sin, **options):
    return rotated(q, cos, sin), rotated(k, cos, sin)


OTHERS = [key_as_it_was, key_backwards, key_first, scaled, tables_of_lo_and_hi_exchanged, second_half_of_the_tables]
OTHERS += [halves_to_pairs, one_sequence_only, rounded_twice, float_only, positions_needed, keywords]


@pytest.mark.parametrize("function", OTHERS)
def test_a_function_that_differs_is_refused(function):
    refusal = recognise_rotation(function)
    assert isinstance(refusal, Refusal)
    assert refusal.reason.startswith(function.__name__)
    assert "PyTorch computes it as before" in refusal.reason


def test_another_helper_is_another_rotation(monkeypatch):
    assert not recognise_rotation(other_default).backwards
    monkeypatch.setitem(globals(), "half", lambda x: -half_before(x))
    assert recognise_rotation(other_default).backwards
    monkeypatch.setitem(globals(), "half", lambda x: x)
    assert isinstance(recognise_rotation(other_default), Refusal)


half_before = half


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, cos, sin: (q, k[:, :, -2:], cos, sin),  # fewer keys than queries
        lambda q, k, cos, sin: (q, k, cos.requires_grad_(), sin),  # trained angles
        lambda q, k, cos, sin: (q, k, cos[:, None], sin[:, None]),  # a table with an axis of heads
        lambda q, k, cos, sin: (q, k, cos[..., :4], sin[..., :4]),  # narrower than Llama's function allows
    ],
)
def test_calls_of_another_form_go_to_the_original(change):
    function = function_of("llama", "apply_rotary_pos_emb")
    ours = rotary_function(function, recognise_rotation(function), otherwise=lambda *args, **kwargs: "original")
    q, k, angles = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 5, 8)
    assert ours(q, k, angles.cos(), angles.sin()) != "original"
    assert ours(*change(q, k, angles.cos(), angles.sin())) == "original"


# Rotations that apply_rope does not have: of values too, of some tokens only, by sections of image positions.
LEFT = {"clvp", "dinov3_vit", "eomt_dinov3", "sapiens2", "edgetam_video", "gemma4"}


@pytest.mark.slow
def test_only_these_families_have_a_rotary_function_that_is_left():
    left = set()
    for family in (module.name for module in pkgutil.iter_modules(transformers.models.__path__)):
        path = Path(transformers.models.__path__[0], family, f"modeling_{family}.py")
        names = re.findall(r"^def (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE) if path.exists() else []
        functions = [function_of(family, name) for name in names if ROTARY_FUNCTION.search(name)]
        left |= {family for function in functions if isinstance(recognise_rotation(function), Refusal)}
    assert left <= LEFT
