"""swiglu, geglu and reglu against float64: split and packed, strides, extremes, gradients in place."""

import pytest
import torch
from ligertune_kernels import GeGLU, ReGLU, SwiGLU, geglu, reglu, swiglu, swiglu_reference
from support.covering import every_pair
from support.kernels.judge import DTYPES, judge_op

OPS = (
    pytest.param(swiglu, {}, id="swiglu"),
    pytest.param(geglu, {}, id="geglu"),
    pytest.param(geglu, {"approximate": "none"}, id="geglu with erf"),
    pytest.param(reglu, {}, id="reglu"),
    pytest.param(reglu, {"squared": True}, id="reglu, squared"),
)
SHAPES = (
    pytest.param((1, 1), id="one number"),
    pytest.param((3, 5, 50), id="block size not a power of two, leading dimensions"),
    pytest.param((2, 2049), id="one column more than a block"),
)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("op, options, shape, dtype", every_pair(OPS, SHAPES, DTYPES))
def test_agrees_with_float64(op, options, shape, dtype, inplace, device) -> None:
    gate, up = (3.0 * torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    for inputs in ([gate, up], [torch.cat((gate, up), dim=-1)]):
        judge_op(op, inputs, ours={"inplace": inplace}, **options)


# gpt-oss and MiniMax M3; DeepSeek V4; Falcon-H1; packed the other way round
FORMS = (
    pytest.param({"alpha": 1.702, "limit": 2.5, "up_offset": 1.0}, id="clamped, with alpha and offset"),
    pytest.param({"limit": 2.5}, id="clamped"),
    pytest.param({"alpha": 0.3, "scale": 0.3}, id="scaled gate"),
    pytest.param({"up_first": True}, id="up first"),
)


@pytest.mark.parametrize("options", FORMS)
@pytest.mark.parametrize("inplace", [False, True])
def test_forms_of_swiglu_agree_with_float64(options, inplace, device) -> None:
    gate, up = (3.0 * torch.randn(4, 50, device=device) for _ in range(2))
    packed = torch.cat((gate, up), dim=-1)
    for inputs in [packed], *([] if "up_first" in options else [[gate, up]]):
        judge_op(swiglu, inputs, ours={"inplace": inplace}, **options)
    if "up_first" in options:
        torch.testing.assert_close(swiglu(packed, **options), swiglu(up, gate), rtol=0, atol=0)
        torch.testing.assert_close(geglu(packed, **options), geglu(up, gate), rtol=0, atol=0)


def test_the_clamp_passes_gradients_within_its_limit_only(device) -> None:
    """As torch's clamp does: the limit itself has a gradient, and a gate far below it, too."""
    gate = torch.tensor([[-9.0, 2.0, 2.5, 2.6, 1.0, 1.0, 1.0]], device=device, requires_grad=True)
    up = torch.tensor([[1.0, 1.0, 1.0, 1.0, -2.5, -2.6, 2.6]], device=device, requires_grad=True)
    d_gate, d_up = torch.autograd.grad(swiglu(gate, up, limit=2.5).sum(), (gate, up))
    assert (d_gate != 0).tolist() == [[True, True, True, False, True, True, True]]
    assert (d_up != 0).tolist() == [[True, True, True, True, True, False, False]]
    only_up = torch.autograd.grad(swiglu(gate.detach(), up, limit=2.5).sum(), up)[0]
    torch.testing.assert_close(only_up, d_up)


def test_options_that_make_no_sense_are_refused(device) -> None:
    gate = torch.ones(2, 4, device=device)
    with pytest.raises(ValueError, match=r"limit is 0\.0; expected a positive number"):
        swiglu(gate, gate, limit=0.0)
    with pytest.raises(ValueError, match="up_first is for one packed tensor"):
        geglu(gate, gate, up_first=True)


@pytest.mark.parametrize("op, options", OPS)
def test_stays_finite_where_the_activation_saturates(op, options, device) -> None:
    gate = torch.tensor([[-1e4, -100.0, -20.0, -0.0, 0.0, 20.0, 100.0, 1e4]], device=device)
    judge_op(op, [gate, torch.ones_like(gate)], **options)


@pytest.mark.parametrize("inplace", [False, True])
def test_takes_inputs_and_gradients_of_any_stride(inplace, device) -> None:
    wide = torch.randn(2, 4, 20, device=device, requires_grad=True)
    for cut in (
        lambda t: (t[..., :10], t[..., 10:]),
        lambda t: (t[:, ::2, ::2], t[:, 1::2, 1::2]),
        lambda t: (t.mT,) * 2,
    ):
        found, expected = swiglu(*cut(wide * 1.0), inplace=inplace), swiglu_reference(*cut(wide * 1.0))
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), wide)[0] for y in (found, expected)))


def test_modules_call_the_functions(device) -> None:
    gate, up = torch.randn(2, 8, device=device), torch.randn(2, 8, device=device)
    torch.testing.assert_close(SwiGLU()(gate, up), swiglu(gate, up))
    torch.testing.assert_close(ReGLU(squared=True)(gate, up), reglu(gate, up, squared=True))
    torch.testing.assert_close(GeGLU("none")(gate, up), geglu(gate, up, approximate="none"))


def made(device, n: int = 2, shape: tuple[int, ...] = (3, 20)) -> list[torch.Tensor]:
    """Return non-leaf tensors, as a projection makes them."""
    return [torch.randn(shape, device=device, requires_grad=True) * 1.0 for _ in range(n)]


@pytest.mark.parametrize("packed", [False, True])
def test_in_place_gradients_use_the_memory_of_the_inputs(packed, device) -> None:
    inputs = made(device, 1 if packed else 2)
    gradients = torch.autograd.grad(swiglu(*inputs, inplace=True).sum(), inputs)
    assert [g.data_ptr() for g in gradients] == [t.data_ptr() for t in inputs]
    halves = made(device, 1, (3, 40))[0].chunk(2, dim=-1)  # halves of a packed projection, passed as two tensors
    gradients = torch.autograd.grad(swiglu(*halves, inplace=True).sum(), halves)
    assert [g.data_ptr() for g in gradients] == [t.data_ptr() for t in halves]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("op, name", [(swiglu, "swiglu"), (geglu, "geglu")])
def test_in_place_refuses_a_second_backward(op, name, packed, device) -> None:
    inputs = made(device, 1 if packed else 2)
    y = op(*inputs, inplace=True).sum()
    torch.autograd.grad(y, inputs, retain_graph=True)
    with pytest.raises(RuntimeError, match=f"^{name}: an earlier backward wrote the gradients over gate and up"):
        torch.autograd.grad(y, inputs)


@pytest.mark.parametrize("reader", ["before", "after"])
def test_in_place_is_right_or_raises_with_another_reader_of_gate(reader, device) -> None:
    """The op that ran last is differentiated first: it still finds gate, or autograd raises an error."""
    leaf = torch.randn(3, 20, device=device, requires_grad=True)
    gate, up = leaf * 1.0, torch.randn(3, 20, device=device)
    if reader == "before":
        other = gate.square()
        total = (other + swiglu(gate, up.clone(), inplace=True)).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()
        return
    y = swiglu(gate, up.clone(), inplace=True)
    (y + gate.square()).sum().backward()
    wanted = leaf.detach().clone().requires_grad_()
    (swiglu_reference(wanted, up) + wanted.square()).sum().backward()
    torch.testing.assert_close(leaf.grad, wanted.grad)


def test_in_place_does_not_overwrite_leaves_or_overlapping_tensors(device) -> None:
    """A leaf's .grad would share its memory."""
    gate, up = (torch.randn(3, 20, device=device, requires_grad=True) for _ in range(2))
    whole = torch.randn(3, 30, device=device, requires_grad=True) * 1.0
    one, row = made(device, 1)[0], made(device, 1, (1, 20))[0].expand(3, 20)
    pairs = ((gate, up), (gate.view(3, 20), up), (one, one), (whole[:, :20], whole[:, 10:]), (row, up))
    for inputs in pairs:
        before = [t.detach().clone() for t in inputs]
        expected = torch.autograd.grad(swiglu_reference(*inputs).sum(), inputs, retain_graph=True)
        found = torch.autograd.grad(swiglu(*inputs, inplace=True).sum(), inputs)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close([t.detach() for t in inputs], before, rtol=0, atol=0)


@pytest.mark.parametrize("op, options", OPS)
def test_in_place_under_checkpointing(op, options, checkpointed, device) -> None:
    x, weight = (torch.randn(size, device=device, requires_grad=True) for size in ((3, 6), (40, 6)))

    def layer(x: torch.Tensor, inplace: bool) -> torch.Tensor:
        return op(x @ weight[:20].t(), x @ weight[20:].t(), inplace=inplace, **options).pow(2).sum()

    expected = torch.autograd.grad(layer(x, False), (x, weight))
    checkpointed(layer, x, True).backward()
    torch.testing.assert_close((x.grad, weight.grad), expected)


@pytest.mark.gpu
def test_in_place_compiles_without_a_graph_break(device) -> None:
    gate, up = (torch.randn(3, 20, device=device, requires_grad=True) for _ in range(2))
    compiled = torch.compile(lambda g, u: swiglu(g * 1.0, u * 1.0, inplace=True), fullgraph=True)
    found, expected = compiled(gate, up), swiglu_reference(gate, up)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.pow(2).sum(), (gate, up)) for y in (found, expected)))
