"""Layers that read the same tensor: the bits of one stacked layer, calls in any order, and what they keep alive."""

import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ligertune.models.float8.float8_linear import Float8Linear, to_float8_linears
from ligertune.training.checkpoint.weight_files import read_scales, write_scales

CPU, WIDTHS, WIDTH = torch.device("cpu"), (64, 32, 16), 48
PLACES = (slice(0, 64), slice(64, 96), slice(96, 112))


def keep(amax: Tensor) -> Tensor:
    """Stand for the reduction over ranks: there is one."""
    return amax


def data(seed: int) -> tuple[Tensor, Tensor]:
    """Return an input (2, 10, WIDTH) and an output gradient of all layers."""
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(2, 10, width, generator=generator) for width in (WIDTH, sum(WIDTHS)))
    dy[..., PLACES[1]] *= 1e-3
    return x.requires_grad_(), dy


def layers(*widths: int, ungrouped: bool = False) -> list[nn.Linear]:
    torch.manual_seed(0)
    made = [nn.Linear(WIDTH, width, bias=False) for width in widths]
    with torch.no_grad():
        made[-1].weight.mul_(10)
    to_float8_linears(made, CPU, ungrouped=set(made) if ungrouped else ())
    return made


def first_step(made: list[nn.Linear]) -> list[nn.Linear]:
    """Let layers find out in a first step that they share their input."""
    x, dy = data(0)
    torch.cat([layer(x) for layer in made], -1).backward(dy)
    made[0].float8_scales.update(keep)
    for layer in made:
        layer.zero_grad()
    return made


def assert_close(found: Tensor, exact: Tensor) -> None:
    """Both operands are rounded to float8."""
    assert 1e-3 < float(((found - exact).norm() / exact.norm()).detach()) < 0.08


def reads_token(y: Tensor) -> bool:
    """Return whether the backward of y comes before that of another layer, and not of its input."""
    return "Float8Product" in y.grad_fn.next_functions[0][0].name()


def gradients(made: list[nn.Linear], x: Tensor, *outputs: Tensor, dy: Tensor, places=PLACES) -> list[Tensor]:
    grads = [dy[..., place] for place in places]
    return list(torch.autograd.grad(outputs, [x, *(layer.weight for layer in made)], grads))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_the_input_gradient_has_the_bits_of_one_stacked_layer(order):
    made = layers(*WIDTHS)
    (stacked,) = layers(sum(WIDTHS))
    with torch.no_grad():
        stacked.weight.copy_(torch.cat([layer.weight for layer in made]))
    first_step(made), first_step([stacked])
    for step in range(1, 3):
        x, dy = data(step)
        ys = dict(sorted((i, made[i](x)) for i in order))
        assert [reads_token(ys[i]) for i in order] == [False, True, True]
        found = gradients(made, x, *ys.values(), dy=dy)
        expected = gradients([stacked], x, stacked(x), dy=dy, places=[slice(None)])
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(torch.cat(found[1:]), expected[1])
        for scales in (made[0].float8_scales, stacked.float8_scales):
            scales.update(keep)
    shared, whole = (layer.float8_scales.scale[:, 0] for layer in (made[0], stacked))
    assert torch.equal(shared, whole.repeat(3))


def test_gradients_are_close_to_float64():
    made = first_step(layers(*WIDTHS))
    x, dy = data(1)
    found = gradients(made, x, *(layer(x) for layer in made), dy=dy)
    assert_close(found[0], dy.double() @ torch.cat([layer.weight for layer in made]).double())


@pytest.mark.parametrize("used", [(0,), (1, 2), (0, 2)])
def test_layers_whose_output_is_not_used_add_nothing(used):
    made = first_step(layers(*WIDTHS))
    x, dy = data(1)
    ys = [layer(x) for layer in made]
    (found,) = torch.autograd.grad([ys[i] for i in used], x, [dy[..., PLACES[i]] for i in used])
    assert_close(found, sum(dy[..., PLACES[i]].double() @ made[i].weight.double() for i in used))


def test_a_graph_can_be_differentiated_twice():
    made = first_step(layers(*WIDTHS))
    x, dy = data(1)
    y = torch.cat([layer(x) for layer in made], -1)
    first, second = (torch.autograd.grad(y, x, dy, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_gradients_of_another_backward_do_not_count():
    q, k, v = first_step(layers(*WIDTHS))
    x, dy = data(1)
    ys = [layer(x) for layer in (q, k, v)]
    torch.autograd.grad(ys[1].sum(), k.weight, retain_graph=True)  # the backward of q does not run
    (found,) = torch.autograd.grad(ys[0], x, dy[..., PLACES[0]])
    assert_close(found, dy[..., PLACES[0]].double() @ q.weight.double())


def test_other_tensors_and_repeated_calls_are_calls_of_their_own():
    q, k, v = first_step(layers(*WIDTHS))
    x, _ = data(1)
    other = x.detach().clone().requires_grad_()
    assert [reads_token(y) for y in (q(x), k(other), v(x), k(x))] == [False, False, False, True]
    base = data(1)[0] * 1
    ys = [q(base), base.add_(1) is None, k(base)]
    assert not reads_token(ys[2])
    assert [reads_token(y) for y in (q(x), q(x), k(x), v(x))] == [False, False, True, True]
    with torch.no_grad():
        assert q(x).grad_fn is None and k(x).grad_fn is None
    assert k(x.detach()).grad_fn.next_functions[0][0] is None  # x needs no gradient


def test_recomputed_layers_have_the_same_gradients():
    made = first_step(layers(*WIDTHS))
    found = []
    for recompute in (False, True):
        x, dy = data(1)

        def call(x: Tensor) -> Tensor:
            return torch.cat([layer(x) for layer in made], -1)

        y = checkpoint(call, x, use_reentrant=False) if recompute else call(x)
        y.backward(dy)
        found.append([x.grad, *(layer.weight.grad.clone() for layer in made)])
        for layer in made:
            layer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_backward_multiplies_by_the_weights_of_its_forward():
    made = first_step(layers(*WIDTHS))
    x, dy = data(1)
    before = torch.cat([layer(x) for layer in made], -1)
    expected = torch.autograd.grad(before, x, dy, retain_graph=True)[0]
    with torch.no_grad():
        for layer in made:
            layer.weight.neg_()
    after = torch.cat([layer(x) for layer in made], -1)
    assert torch.equal(torch.autograd.grad(before, x, dy)[0], expected)
    assert torch.equal(torch.autograd.grad(after, x, dy)[0], -expected)


def test_a_weight_that_changes_between_the_calls():
    q, k, v = first_step(layers(*WIDTHS))
    x, dy = data(1)
    y = [q(x)]
    with torch.no_grad():
        q.weight.neg_()
    q.quantized_weight()  # makes a new matrix, which the others write to
    y += [k(x), v(x)]
    found = torch.autograd.grad(torch.cat(y, -1), x, dy)[0]
    with torch.no_grad():
        q.weight.neg_()
    assert_close(found, dy.double() @ torch.cat([layer.weight for layer in (q, k, v)]).double())


def test_old_copies_and_graphs_are_freed():
    made = first_step(layers(*WIDTHS))
    x, dy = data(1)
    y = torch.cat([layer(x) for layer in made], -1)
    copies = weakref.ref(made[0].quantized_weight().whole)
    y.backward(dy)
    del y
    made[0].float8_scales.update(keep)
    assert all(layer(x) is not None for layer in made)
    assert copies() is None


def test_a_resumed_run_groups_its_layers_at_once(tmp_path):
    made, resumed = first_step(layers(*WIDTHS)), layers(*WIDTHS)
    write_scales(made[0].float8_scales, tmp_path)
    read_scales(resumed[0].float8_scales, tmp_path)
    x, dy = data(1)
    found = [gradients(each, x, *(layer(x) for layer in each), dy=dy) for each in (made, resumed)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_checkpoint_without_groups_finds_them_in_the_next_step():
    """Checkpoints of older versions have none."""
    made, resumed = first_step(layers(*WIDTHS)), layers(*WIDTHS)
    state = made[0].float8_scales.state()
    del state["sources"]
    resumed[0].float8_scales.load(state)
    assert resumed[1].input_group is None
    first_step(resumed)
    assert resumed[1].input_group is resumed[0].input_group is not None


@pytest.mark.parametrize(
    "widths, ungrouped, grouped",
    [((96, 96), False, True), ((96, 96), True, False), ((192, 16), False, False), ((48,), False, False)],
    ids=str,
)
def test_only_layers_with_few_outputs_share_a_product(widths, ungrouped, grouped):
    made = layers(*widths, ungrouped=ungrouped)
    x = torch.randn(4, WIDTH, requires_grad=True)
    for layer in made:
        layer(x).sum().backward()
    made[0].float8_scales.update(keep)
    assert all(isinstance(layer, Float8Linear) and (layer.input_group is not None) == grouped for layer in made)
