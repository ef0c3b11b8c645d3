"""gated_rms_norm against float64: both orders of gate and norm, groups, sizes at launch thresholds, strides."""

import ligertune_kernels as kernels
import pytest
import torch
from ligertune_kernels import gated_rms_norm, gated_rms_norm_reference
from support.covering import every_pair
from support.kernels.judge import DTYPES, judge_op

FP32, BF16, FP16 = DTYPES

# shape, group_size
SIZES = (
    pytest.param((1, 7), None, id="one short row"),
    pytest.param((99, 3, 96), None, id="leading dimensions, ragged last tile, two tiles per program"),
    pytest.param((41, 96), 32, id="groups, two tiles per program"),
    pytest.param((3, 3 * 1025), 1025, id="groups of an odd size"),
    pytest.param((5, 4096), None, id="one row per tile"),
    pytest.param((3, 4112), None, id="first size whose backward takes two parts"),
    pytest.param((1, 2 * 8208), 8208, id="groups of several parts, and a swept forward"),
)
FORMS = tuple(
    pytest.param({"norm_before_gate": before, "activation": activation, "cast": cast}, weighted, id=name)
    for name, before, activation, cast, weighted in (
        ("Qwen3-Next", True, "silu", "llama", True),
        ("Kimi Linear", True, "sigmoid", "gemma", True),
        ("Mamba 2", False, "silu", "llama", True),
        ("Falcon-H1", False, "silu", "gemma", True),
        ("norm first, no weight", True, "silu", "llama", False),
        ("gate first, no weight", False, "sigmoid", "llama", False),
    )
)


def normal(*shapes: tuple[int, ...], device: torch.device, dtype: torch.dtype = FP32) -> list[torch.Tensor]:
    return [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("shape, group_size, options, weighted, dtype", every_pair(SIZES, FORMS, DTYPES))
def test_agrees_with_float64(shape, group_size, options, weighted, dtype, device) -> None:
    inputs = normal(shape, shape, *[shape[-1:]] * weighted, device=device, dtype=dtype)
    judge_op(gated_rms_norm, inputs, eps=1e-5, group_size=group_size, **options)


@pytest.mark.parametrize("before", [True, False])
def test_takes_inputs_and_gradients_of_any_stride(before, device) -> None:
    wide, w = torch.randn(4, 6, 160, device=device), torch.randn(40, device=device)
    pairs = wide.chunk(4, -1)[:2], (wide[..., 1:41], wide[:, :, 81:121]), (wide[:, ::2, :40], wide[:, 1::2, 40:80])
    for x, gate in pairs:
        leaves = [t.detach().requires_grad_() for t in (x, gate)]
        options = {"norm_before_gate": before, "group_size": 20}
        ours, plain = (op(*leaves, w, **options) for op in (gated_rms_norm, gated_rms_norm_reference))
        torch.testing.assert_close(ours, plain)
        for upstream in (torch.ones((), device=device).expand(plain.shape), plain.detach()):
            found, expected = (torch.autograd.grad(y, leaves, upstream, retain_graph=True) for y in (ours, plain))
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "x_dtype, gate_dtype, weight_dtype, before, expected",
    [
        (BF16, BF16, FP32, True, BF16),
        (BF16, BF16, FP32, False, FP32),  # as Mamba 2
        (FP32, BF16, BF16, False, FP32),
        (BF16, FP32, BF16, True, BF16),
    ],
)
def test_the_result_has_the_dtype_of_transformers(x_dtype, gate_dtype, weight_dtype, before, expected, device) -> None:
    leaves = [
        torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
        for shape, dtype in (((5, 64), x_dtype), ((5, 64), gate_dtype), ((64,), weight_dtype))
    ]
    y, plain = (op(*leaves, norm_before_gate=before) for op in (gated_rms_norm, gated_rms_norm_reference))
    assert y.dtype == plain.dtype == expected
    upstream = torch.randn_like(y)
    found, reference = (torch.autograd.grad(out, leaves, upstream) for out in (y, plain))
    for ours, theirs, leaf in zip(found, reference, leaves, strict=True):
        assert ours.dtype == leaf.dtype
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.05)


def test_inference_gives_the_same_result_and_keeps_nothing(device) -> None:
    leaves = normal((5, 64), (5, 64), (64,), device=device)
    trained = gated_rms_norm(*leaves)
    with torch.no_grad():
        inferred = gated_rms_norm(*leaves)
    assert torch.equal(trained, inferred) and inferred.grad_fn is None


def test_the_backward_keeps_one_number_for_each_group_besides_its_inputs(device) -> None:
    x, gate, w = normal((6, 64), (6, 64), (64,), device=device)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        gated_rms_norm(x, gate, w, group_size=16)
    if kernels.runs_triton(x):
        assert sorted(t.numel() for t in saved if all(t is not leaf for leaf in (x, gate, w))) == [6 * 4]


def test_the_module_is_the_op_and_starts_with_a_weight_of_one(device) -> None:
    norm = kernels.GatedRMSNorm(24, group_size=8, norm_before_gate=False).to(device)
    x, gate = torch.randn(2, 3, 24, device=device).unbind()
    torch.testing.assert_close(norm(x, gate), gated_rms_norm_reference(x, gate, group_size=8, norm_before_gate=False))
    with pytest.raises(TypeError, match="unexpected keyword argument 'groups'"):
        kernels.GatedRMSNorm(24, groups=3)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"gate": torch.zeros(3, 4)}, "gate is (3, 4), but x is (3, 8): expected its shape"),
        ({"weight": torch.zeros(4)}, "weight is (4,), but x is (3, 8): expected its last size"),
        ({"group_size": 3}, "group_size is 3, but x has 8 columns: expected a divisor"),
        ({"activation": "relu"}, "activation is 'relu'; expected 'silu' or 'sigmoid'"),
        ({"cast": "none"}, "cast is 'none'; expected 'llama' or 'gemma'"),
    ],
)
def test_bad_arguments_are_named(change, message) -> None:
    arguments = {"x": torch.zeros(3, 8), "gate": torch.zeros(3, 8)} | change
    with pytest.raises(ValueError) as error:
        gated_rms_norm(**arguments)
    assert str(error.value) == f"gated_rms_norm: {message}"
