"""All norms against float64: sizes on both sides of every launch threshold, strides, in-place gradients, launches."""

from functools import partial

import ligertune_kernels as kernels
import pytest
import torch
from ligertune_kernels import AddRMSNorm, RMSNorm, add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from support.covering import every_pair
from support.kernels.judge import DTYPES, judge, judge_op
from torch.nn import functional as F

FP32, BF16, FP16 = DTYPES


def normal(*shapes: tuple[int, ...], device: torch.device, dtype: torch.dtype = FP32) -> list[torch.Tensor]:
    return [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]


SIZES = (
    pytest.param((1, 7), id="one short row"),
    pytest.param((99, 3, 96), id="leading dimensions, ragged last tile, two tiles per program"),
    pytest.param((41, 1025), id="two rows per tile, three tiles per program"),
    pytest.param((5, 5000), id="one row per tile"),
    pytest.param((5, 8193), id="first size whose backward takes two parts"),
    pytest.param((5, 8208), id="long row that the backward holds whole if packed"),
    pytest.param((2, 16385), id="first size with several backward parts and a swept forward"),
)
ONE_COLUMN = pytest.param((3, 1), id="one column, whose variance is zero")
# op, tensors of x's shape, tensors of a row's, options
NORMS = (
    *(
        pytest.param("rms_norm", 1, 1, {"cast": cast, "offset": offset}, id=f"rms_norm {cast} {offset}")
        for cast, offset in (("llama", 0.0), ("gemma", 1.0), ("gemma", 0.0), ("none", 0.0))
    ),
    pytest.param("rms_norm", 1, 0, {}, id="rms_norm without a weight"),
    pytest.param("rms_norm", 1, 0, {"cast": "deepseek"}, id="rms_norm deepseek"),
    pytest.param("add_rms_norm", 2, 0, {}, id="add_rms_norm without a weight"),
    pytest.param("add_rms_norm", 2, 1, {"cast": "llama", "offset": 0.0}, id="add_rms_norm llama"),
    pytest.param("add_rms_norm", 2, 1, {"cast": "gemma", "offset": 1.0}, id="add_rms_norm gemma"),
    pytest.param("layer_norm", 1, 2, {}, id="layer_norm"),
)
GROUPS = (
    pytest.param((3, 12), 3, id="no positions: norm of four channels"),
    pytest.param((2, 4, 1), 4, id="one element per group: variance zero"),
    pytest.param((2, 6, 7, 5), 2, id="ragged channels and positions in one tile"),
    pytest.param((1, 5, 17, 19), 1, id="channels in several tiles, the last ragged"),
    pytest.param((2, 2, 70, 71), 1, id="positions of a channel in two tiles"),
    pytest.param((17, 5000), 1, id="more channels and samples than a tile holds"),
)


@pytest.mark.parametrize(
    "shape, name, n_rows, n_affine, options, dtype",
    [*every_pair(SIZES, NORMS, DTYPES), *every_pair([ONE_COLUMN], NORMS[-1:], DTYPES)],
)
def test_agrees_with_float64(shape, name, n_rows, n_affine, options, dtype, device) -> None:
    inputs = normal(*[shape] * n_rows, *[shape[-1:]] * n_affine, device=device, dtype=dtype)
    judge_op(getattr(kernels, name), inputs, eps=1e-5, **options)


def test_layer_norm_of_long_rows_in_halves_agrees_with_float64(device) -> None:
    """A backward that holds a bfloat16 row whole. In place only: the interpreter takes a second for each row."""
    inputs = normal((5, 16384), (16384,), (16384,), device=device, dtype=BF16)
    judge_op(kernels.layer_norm, inputs, ours={"inplace": True})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape, num_groups", GROUPS)
def test_group_norm_agrees_with_float64(shape, num_groups, dtype, device) -> None:
    judge(
        lambda x, w, b: kernels.group_norm(x, num_groups, w, b, 1e-4),
        lambda x, w, b: kernels.group_norm_reference(x, num_groups, w, b, 1e-4),
        normal(shape, shape[1:2], shape[1:2], device=device, dtype=dtype),
    )


# The second argument is the size or the number of groups.
MISSING = (
    pytest.param(lambda x, _, *affine: kernels.layer_norm(x, *affine), F.layer_norm, (5, 40), (40,), id="whole rows"),
    pytest.param(lambda x, _, *affine: kernels.layer_norm(x, *affine), F.layer_norm, (2, 16400), (16400,), id="swept"),
    pytest.param(kernels.group_norm, kernels.group_norm_reference, (2, 6, 5), 3, id="groups"),
)


@pytest.mark.parametrize("op, reference, shape, second", MISSING)
def test_weight_and_bias_may_be_missing(op, reference, shape, second, device) -> None:
    x, w, b = normal(shape, shape[1:2], shape[1:2], device=device)
    judge(lambda x: op(x, second), lambda x: reference(x, second), [x])
    judge(lambda x, w: op(x, second, w), lambda x, w: reference(x, second, w), [x, w])
    judge(lambda x, b: op(x, second, None, b), lambda x, b: reference(x, second, None, b), [x, b])


def test_layer_norm_adds_the_offset_in_the_weights_dtype(device) -> None:
    x, w, b = (t.detach() for t in normal((5, 40), (40,), (40,), device=device, dtype=BF16))
    leaves = [t.requires_grad_() for t in (x, w, b)]
    judge_op(kernels.layer_norm, leaves, offset=1.0)
    expected = kernels.layer_norm(x, (w + 1.0).detach(), b)
    assert torch.equal(kernels.layer_norm(x, w, b, offset=1.0), expected)


def test_group_norm_takes_channels_last_and_upstream_of_any_stride(device) -> None:
    x = torch.randn(2, 6, 4, 5, device=device).to(memory_format=torch.channels_last).requires_grad_()
    y, expected = kernels.group_norm(x, 2), kernels.group_norm_reference(x, 2)
    torch.testing.assert_close(y, expected)
    up = torch.randn(5, 4, 6, 2, device=device).permute(3, 2, 1, 0)
    torch.testing.assert_close(torch.autograd.grad(y, x, up), torch.autograd.grad(expected, x, up))


# Whole rows; a long row; parts, which read each other's columns; parts and a swept forward.
ROWS = (((5, 64), FP32), ((5, 8208), FP16), ((5, 8208), FP32), ((2, 16400), FP32))


@pytest.mark.parametrize(
    "op, n_rows, n_affine",
    [("rms_norm", 1, 1), ("rms_norm", 1, 0), ("add_rms_norm", 2, 1), ("add_rms_norm", 2, 0), ("layer_norm", 1, 2)],
)
@pytest.mark.parametrize("shape, dtype", ROWS, ids=str)
def test_inplace_changes_no_gradient(op, n_rows, n_affine, shape, dtype, device) -> None:
    inputs = normal(*[shape] * n_rows, *[shape[-1:]] * n_affine, device=device, dtype=dtype)
    upstream = torch.randn(n_rows, *shape, device=device, dtype=dtype)
    op = getattr(kernels, op)
    plain, reused = (
        torch.autograd.grad(op(*inputs, inplace=inplace), inputs, tuple(upstream.clone())) for inplace in (False, True)
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, reused, strict=True))


@pytest.mark.parametrize("name, n_affine", [("rms_norm", 1), ("rms_norm", 0), ("layer_norm", 2)])
def test_takes_inputs_and_gradients_of_any_stride(name, n_affine, device) -> None:
    op, reference = getattr(kernels, name), getattr(kernels, f"{name}_reference")
    wide, *affine = (torch.randn(s, device=device) for s in ((4, 6, 80), *[(40,)] * n_affine))
    for x in (wide[..., :40], wide[:, ::2, 1:41], wide[:, 0, ::2], wide.transpose(0, 2)[:, :, 0].T[:, :40]):
        x = x.detach().requires_grad_()
        y, expected = op(x, *affine), reference(x, *affine)
        torch.testing.assert_close(y, expected)
        for upstream in (torch.ones((), device=device).expand(y.shape), y.detach()):  # strides of zero
            ours, plain = (torch.autograd.grad(t, x, upstream, retain_graph=True) for t in (y, expected))
            torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("n_cols", [100, 16400])  # ragged: unmasked padding would change the variance; and swept
def test_variance_is_accurate_with_a_large_mean(n_cols, device) -> None:
    x = 1e4 + torch.randn(3, n_cols, device=device)
    tolerance = {"rtol": 0.0, "atol": 2e-3}  # x itself is rounded to 1e-3
    torch.testing.assert_close(kernels.layer_norm(x), kernels.layer_norm_reference(x.double()).float(), **tolerance)
    groups = x[:2].view(2, 4, -1)
    torch.testing.assert_close(
        kernels.group_norm(groups, 2), kernels.group_norm_reference(groups.double(), 2).float(), **tolerance
    )


def test_gradients_have_the_dtypes_of_their_parameters(device) -> None:
    (x,), (w, b) = normal((4, 32, 1), device=device, dtype=BF16), normal((32,), (32,), device=device)
    b = b.detach().bfloat16().requires_grad_()
    for y in (kernels.layer_norm(x[..., 0], w, b), kernels.group_norm(x, 4, w, b)):
        grads = torch.autograd.grad(y.sum(), (x, w, b))
        assert (y.dtype, *(grad.dtype for grad in grads)) == (BF16, BF16, FP32, BF16)


MODULES = (
    ("GroupNorm", (4, 8), {}, (3, 8, 6)),
    ("RMSNorm", (24,), {"eps": 1e-5, "elementwise_affine": False}, (3, 24)),
    ("LayerNorm", (24,), {}, (3, 24)),
    ("LayerNorm", (24,), {"bias": False}, (3, 24)),
)


@pytest.mark.parametrize("name, sizes, options, shape", MODULES)
def test_modules_agree_with_torchs(name, sizes, options, shape, device) -> None:
    ours, torchs = (getattr(package, name)(*sizes, **options).to(device) for package in (kernels, torch.nn))
    x = torch.randn(shape, device=device)
    for parameter in torchs.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(torchs.state_dict())
    torch.testing.assert_close(ours(x), torchs(x))


@pytest.mark.parametrize("cast, dtype", [("llama", FP32), ("gemma", BF16)])
def test_a_wider_weight_widens_the_result_only_under_llama(cast, dtype, device) -> None:
    x, w = torch.randn(4, 32, device=device, dtype=BF16), torch.randn(32, device=device)
    assert rms_norm(x, w, cast=cast).dtype == dtype
    judge_op(rms_norm, [x, w], cast=cast)


@pytest.mark.parametrize("cast", ["llama", "gemma", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_without_a_weight_is_the_one_with_a_weight_of_one(cast, dtype, device) -> None:
    x, residual = normal((5, 64), (5, 64), device=device, dtype=dtype)
    ones, upstream = torch.ones(64, device=device, dtype=dtype), torch.randn(5, 64, device=device, dtype=dtype)
    for op, inputs in ((rms_norm, (x,)), (lambda *given, **options: add_rms_norm(*given, **options)[0], (x, residual))):
        weighted, plain = op(*inputs, ones, cast=cast), op(*inputs, None, cast=cast)
        assert torch.equal(plain, weighted)
        found, expected = (torch.autograd.grad(y, x, upstream)[0] for y in (plain, weighted))
        assert torch.equal(found, expected)


def test_each_setting_gets_its_own_launch_plan(device) -> None:
    """Launch plans are cached; every setting that a plan depends on must be part of the key."""
    w = torch.rand(64, device=device)
    x = torch.randn(300, 64, device=device)
    usual = {"n_rows": 3, "eps": 1e-6, "offset": 0.0, "cast": "llama", "grads": (True, True)}
    for change in ({}, {"n_rows": 300}, {"eps": 0.5}, {"offset": 1.0}, {"cast": "gemma"}, {"grads": (True, False)}):
        n_rows, eps, offset, cast, grads = (usual | change).values()
        inputs = [x[:n_rows].bfloat16(), w]
        judge_op(rms_norm, inputs, compare=partial(judge, grads=grads), eps=eps, offset=offset, cast=cast)


def test_takes_tensors_left_over_from_an_ended_transform(device) -> None:
    left: list[torch.Tensor] = []

    def keeps(x: torch.Tensor) -> torch.Tensor:
        left.append(2.0 * x)
        return left[0].sum()

    torch.func.grad(keeps)(torch.randn(4, 8, device=device))
    w = torch.ones(8, device=device, requires_grad=True)
    assert torch.autograd.grad(rms_norm(left[0], w).sum(), w)[0].shape == (8,)


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "vmap": lambda f, x: torch.func.vmap(f)(x[None]),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("needs_grad", [False, True])
def test_kernels_refuse_transforms_of_torch_func(transform, needs_grad, device) -> None:
    x, w = torch.randn(4, 8, device=device), torch.ones(8, device=device, requires_grad=needs_grad)
    with pytest.raises(RuntimeError, match=r"do not work under torch.func's transforms \(grad, jvp, vmap\)"):
        TRANSFORMS[transform](lambda x: rms_norm(x, w), x)


def test_kernels_refuse_forward_mode_differentiation_instead_of_losing_the_tangent(device) -> None:
    x = torch.randn(4, 8, device=device)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        assert rms_norm(x).shape == x.shape  # a constant
        with pytest.raises(RuntimeError, match="forward-mode differentiation"):
            rms_norm(dual)


def test_the_reference_of_a_norm_works_under_torch_func(device) -> None:
    x, w = torch.randn(4, 8, device=device), torch.ones(8, device=device)
    (expected,) = torch.autograd.grad(rms_norm_reference(x.requires_grad_(), w).square().sum(), x)
    found = torch.func.grad(lambda x: rms_norm_reference(x, w).square().sum())(x.detach())
    torch.testing.assert_close(found, expected)


def test_saves_nothing_without_grad(device) -> None:
    x, w = torch.randn(4, 8, device=device), torch.ones(8, device=device, requires_grad=True)
    with torch.no_grad():
        assert rms_norm(x, w).grad_fn is None
    assert not rms_norm(x, w.detach()).requires_grad


def test_the_incoming_gradient_is_overwritten_only_with_inplace(device) -> None:
    x, w = torch.randn(5, 64, device=device, requires_grad=True), torch.ones(64, device=device)
    dy = torch.randn(5, 64, device=device)
    before = dy.clone()
    torch.autograd.grad(rms_norm(x, w), x, dy)
    assert torch.equal(dy, before)
    (dx,) = torch.autograd.grad(rms_norm(x, w, inplace=True), x, dy)
    assert dx.data_ptr() == dy.data_ptr()
    assert dy._version > before._version  # an op that saved it would raise in its backward
    spread = torch.randn((), device=device).expand(5, 64)  # its rows share memory: never overwritten
    torch.autograd.grad(rms_norm(x, w, inplace=True), x, spread)
    assert torch.equal(spread, spread[:1, :1].expand(5, 64))


def test_modules_start_with_a_scale_of_one_and_take_each_others_state(device) -> None:
    x, residual = torch.randn(2, 4, 32, device=device).unbind()
    norm, fused, gemma = RMSNorm(32), AddRMSNorm(32), RMSNorm(32, offset=1.0, cast="gemma")
    torch.testing.assert_close(norm.to(device)(x), gemma.to(device)(x))
    torch.nn.init.normal_(norm.weight)
    fused.load_state_dict(norm.state_dict())
    torch.testing.assert_close(fused.to(device)(x, residual)[0], rms_norm_reference(x + residual, norm.weight))


def test_the_norm_uses_the_rounded_sum(device) -> None:
    """1 + 2⁻⁹ is 1 in bf16, rounded or truncated: the sum is exact, and the norm is that of ones."""
    x = torch.ones(64, 64, device=device, dtype=BF16)
    y, new_residual = add_rms_norm(x, torch.full_like(x, 2.0**-9), x[0], 0.0, cast="none")
    assert torch.equal(new_residual, x) and torch.equal(y, x)


@pytest.mark.parametrize("used", [0, 1], ids=["only the norm is used", "only the sum is used"])
def test_an_unused_output_changes_no_gradient(used, device) -> None:
    leaves = [torch.randn(s, device=device, requires_grad=True) for s in ((4, 33), (4, 33), (33,))]
    expected = torch.autograd.grad(add_rms_norm_reference(*leaves)[used].square().sum(), leaves, allow_unused=True)
    ours = torch.autograd.grad(add_rms_norm(*leaves)[used].square().sum(), leaves, allow_unused=True)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("inplace", [False, True])
def test_gradients_of_both_uses_of_the_sum_add_up(inplace, device) -> None:
    """x and residual receive one gradient tensor, and y + s passes one to both results: neither may be overwritten."""
    x, w = torch.randn(4, 24, device=device, requires_grad=True), torch.ones(24, device=device)
    found = []
    for op in (partial(add_rms_norm, inplace=inplace), add_rms_norm_reference):
        y, s = op(x, x, w)
        z, t = op(y + s, s, w)
        found.append(torch.autograd.grad((z + t + s).square().sum(), x)[0])
    torch.testing.assert_close(*found)


def test_add_rms_norm_takes_tensors_of_any_stride_and_of_two_dtypes(device) -> None:
    wide, swept, w = (torch.randn(shape, device=device) for shape in ((4, 6, 80), (2, 10_000), (5000,)))
    pairs = (wide[..., :40], wide[..., 40:]), (wide[:, ::2, 1:41], wide.bfloat16()[:, 1::2, ::2]), swept.chunk(2, -1)
    for pair in pairs:
        leaves = [t.detach().requires_grad_() for t in pair]
        ours, expected = (op(*leaves, w[: pair[0].shape[-1]]) for op in (add_rms_norm, add_rms_norm_reference))
        torch.testing.assert_close(ours, expected)
        upstream = [torch.randn_like(y.repeat_interleave(2, -1))[..., : y.shape[-1]] for y in expected]
        torch.testing.assert_close(*(torch.autograd.grad(outs, leaves, upstream) for outs in (ours, expected)))
