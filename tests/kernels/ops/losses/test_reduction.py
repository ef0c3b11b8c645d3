"""Common to all losses: divisors, ignored rows, strides, second backward, modules."""

from collections.abc import Callable
from dataclasses import dataclass

import ligertune_kernels as kernels
import pytest
import torch
from ligertune_kernels import launcher, runs_triton
from support.kernels.judge import judge
from torch import Tensor
from torch.nn import functional as F

HIDDEN, VOCAB = 24, 41


@dataclass(frozen=True)
class Loss:
    """A loss, with tensors whose leading dimensions are those of the labels, and tensors of the vocabulary."""

    name: str
    module: Callable[..., torch.nn.Module]
    options: dict[str, float | str]  # of the module
    widths: tuple[int, ...]  # last sizes of the tensors with leading dimensions
    has_weights: bool = False
    has_labels: bool = True
    log_probs: bool = False

    def tensors(self, device: torch.device, leading: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Return tensors with leading dimensions, weights, and labels, a quarter ignored."""
        rows = [torch.randn(*leading, width, device=device) for width in self.widths]
        rows = [t.log_softmax(-1) for t in rows] if self.log_probs else rows
        rows[1:] = rows[1:] if self.has_labels else [t.exp() for t in rows[1:]]  # kl_div takes probabilities
        weights = [torch.randn(VOCAB, width, device=device) for width in self.widths] if self.has_weights else []
        labels = torch.randint(VOCAB, leading, device=device)
        labels.view(-1)[1::4] = -100
        return rows, weights, labels

    def call(self, function: Callable, rows: list[Tensor], weights: list[Tensor], labels: Tensor, **options) -> Tensor:
        if "cross_entropy" in self.name:
            return function(*rows, *weights, labels, **options)
        arguments = [t for pair in zip(rows, weights, strict=True) for t in pair] if weights else rows
        return function(*arguments, **({"labels": labels} if self.has_labels else {}), **options)

    def __call__(self, *tensors, **options) -> Tensor:
        return self.call(getattr(kernels, self.name), *tensors, **options)

    def reference(self, *tensors, **options) -> Tensor:
        return self.call(getattr(kernels, f"{self.name}_reference"), *tensors, **options)


LOSSES = (
    Loss("cross_entropy", kernels.CrossEntropyLoss, {"label_smoothing": 0.1, "reduction": "sum"}, (VOCAB,)),
    Loss("linear_cross_entropy", kernels.LinearCrossEntropyLoss, {"softcap": 2.0}, (HIDDEN,), has_weights=True),
    Loss(
        "kl_div", kernels.KLDivLoss, {"reduction": "batchmean", "log_target": False}, (VOCAB, VOCAB),
        has_labels=False, log_probs=True,
    ),
    Loss("jsd", kernels.JSDLoss, {"beta": 0.2}, (VOCAB, VOCAB), log_probs=True),
    Loss("linear_jsd", kernels.LinearJSDLoss, {"beta": 0.2, "temperature": 2.0}, (HIDDEN, 40), has_weights=True),
)  # fmt: skip


def losses(condition: Callable[[Loss], bool] = lambda loss: True) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("loss", list(filter(condition, LOSSES)), ids=lambda loss: loss.name)


def losses_with(*choices: dict[str, float | str]) -> pytest.MarkDecorator:
    """Parametrize over the losses that have labels, each with those choices of options that it takes."""
    pairs = [
        pytest.param(loss, options, id=f"{loss.name} {options}")
        for loss in LOSSES
        for options in choices
        if loss.has_labels and options.keys() <= set(getattr(kernels, loss.name).__code__.co_varnames)
    ]
    return pytest.mark.parametrize("loss, options", pairs)


@losses()
def test_a_second_backward_is_right_or_refused_and_changes_no_input(loss, device) -> None:
    rows, weights, labels = loss.tensors(device, (11,))
    before = [t.clone() for t in (*rows, *weights)]
    value = 3.0 * loss([rows[0].requires_grad_(), *rows[1:]], weights, labels)
    (first,) = torch.autograd.grad(value, rows[0], retain_graph=True)
    if runs_triton(rows[0]):
        with pytest.raises(RuntimeError, match=rf"{loss.name}.*run the forward again"):
            value.backward()
    else:
        assert torch.equal(first, torch.autograd.grad(value, rows[0])[0])
    assert all(torch.equal(t, kept) for t, kept in zip((*rows, *weights), before, strict=True))


@losses(lambda loss: loss.name != "linear_jsd")
def test_losses_of_single_rows_have_a_second_backward(loss, device) -> None:
    rows, weights, labels = loss.tensors(device, (11,))
    value = loss([rows[0].requires_grad_(), *rows[1:]], weights, labels, reduction="none").sum()
    first, second = (torch.autograd.grad(value, rows[0], retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second) and first.any()


@losses()
def test_without_grad_only_the_loss_is_computed(loss, device) -> None:
    tensors = loss.tensors(device, (11,))
    expected = loss(*tensors)
    tensors[0][0].requires_grad_()
    with torch.no_grad():
        value = loss(*tensors)
    assert torch.equal(value, expected) and value.grad_fn is None


@losses()
def test_the_module_is_the_function_and_knows_its_options(loss, device) -> None:
    tensors = loss.tensors(device, (11,))
    module = loss.module(**loss.options)
    assert torch.equal(loss.call(module, *tensors), loss(*tensors, **loss.options))
    assert repr(module) == f"{loss.module.__name__}({', '.join(f'{k}={v}' for k, v in loss.options.items())})"
    with pytest.raises(TypeError, match="unexpected keyword argument 'temprature'"):
        loss.module(temprature=1.0)


@losses()
def test_takes_tensors_of_any_stride_and_small_labels(loss, device) -> None:
    rows, weights, labels = loss.tensors(device, (6, 4))
    doubled = [t.repeat_interleave(2, -1) for t in rows]  # every second column
    for rows_of in (lambda t: t[:, :-1], lambda t: t.transpose(0, 1), lambda t: t[1:, ::2]):
        cut = [rows_of(t) for t in rows], weights, rows_of(labels)
        expected = loss.reference(*cut)
        torch.testing.assert_close(loss(*cut), expected)
        torch.testing.assert_close(loss([rows_of(t)[..., ::2] for t in doubled], weights, cut[2].int()), expected)


@losses()
@pytest.mark.parametrize("shape", [(0,), (2, 0)])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_empty_tensors_have_a_loss_of_zero(reduction, shape, loss, device) -> None:
    rows, weights, labels = loss.tensors(device, shape)
    options = {} if loss.name == "linear_jsd" else {"reduction": reduction}
    leaves = [t.requires_grad_() for t in (rows[0], *weights)]
    value = loss(rows, weights, labels, **options)
    value.sum().backward()
    assert not value.any() and leaves[0].grad.shape == leaves[0].shape
    assert len(leaves) == 1 or not leaves[1].grad.any()
    assert reduction == "sum" or "reduction" not in options or value.shape[: len(shape)] == shape


@losses_with({}, {"z_loss": 0.1, "label_smoothing": 0.1}, {"beta": 0.0}, {"beta": 1.0}, {"num_items_in_batch": 0})
def test_all_rows_ignored_give_zero_and_zero_gradients(loss, options, device) -> None:
    rows, weights, labels = loss.tensors(device, (11,))
    leaves = [t.requires_grad_() for t in (rows[0], *weights[:1])]
    value = loss(rows, weights, labels.fill_(-7), ignore_index=-7, **options)
    value.backward()
    assert value == 0.0 and not any(leaf.grad.any() for leaf in leaves)
    if "num_items_in_batch" in options:
        assert loss(rows, weights, labels, ignore_index=-7, num_items_in_batch=torch.tensor(0, device=device)) == 0.0


@losses(lambda loss: "cross_entropy" in loss.name)
def test_a_label_that_is_no_class_is_nan_in_its_row_alone(loss, device) -> None:
    rows, weights, labels = loss.tensors(device, (11,))
    labels[2], labels[3], labels[4] = VOCAB, -1, VOCAB - 1
    losses = loss([rows[0].requires_grad_()], weights, labels, reduction="none")
    losses.sum().backward()
    for found in (losses.isnan(), rows[0].grad.isnan().all(dim=1), rows[0].grad.isnan().any(dim=1)):
        assert found.nonzero().flatten().tolist() == [2, 3]
    assert loss(rows, weights, labels).isnan()


@losses_with({"num_items_in_batch": 37}, {"num_items_in_batch": 37, "reduction": "sum"})
def test_num_items_in_batch_replaces_the_divisor(loss, options, device) -> None:
    rows, weights, labels = loss.tensors(device, (11,))
    n = options["num_items_in_batch"]
    for y in (labels, labels.clamp(min=0)):
        expected = loss.reference(rows, weights, y) * (y != -100).sum() / n
        for function in (loss, loss.reference):
            for count in (n, torch.tensor(n, device=device)):
                found = function(rows, weights, y, **(options | {"num_items_in_batch": count}))
                torch.testing.assert_close(found, expected)


def test_the_z_loss_is_a_mean_over_tokens_with_class_weights_too(device) -> None:
    """As in PaLM; only the cross-entropy is divided by the sum of the weights."""
    hidden, weight = (torch.randn(size, device=device, requires_grad=True) for size in ((9, 16), (12, 16)))
    labels, classes = torch.arange(9, device=device), torch.linspace(0.1, 3.0, 12, device=device)
    labels[4] = -100
    kept = (hidden @ weight.T)[labels != -100]
    expected = F.cross_entropy(kept, labels[labels != -100], weight=classes) + 0.3 * kept.logsumexp(-1).square().mean()
    truth = torch.autograd.grad(expected, (hidden, weight))
    for name, class_weight in (("cross_entropy", "weight"), ("linear_cross_entropy", "class_weight")):
        for op in (getattr(kernels, name), getattr(kernels, f"{name}_reference")):
            given = (hidden, weight) if name.startswith("linear") else (hidden @ weight.T,)
            loss = op(*given, labels, z_loss=0.3, **{class_weight: classes})
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(torch.autograd.grad(loss, (hidden, weight)), truth, rtol=1e-4, atol=1e-5)


@losses()
def test_saved_tensors_may_be_offloaded(loss, device) -> None:
    rows, weights, labels = loss.tensors(device, (11,))
    rows[0].requires_grad_()
    (expected,) = torch.autograd.grad(3.0 * loss(rows, weights, labels), rows[0])
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        value = 3.0 * loss(rows, weights, labels)
    assert torch.equal(torch.autograd.grad(value, rows[0])[0], expected)


@losses(lambda loss: loss.has_weights)
def test_float16_survives_gradscalers_factor(loss, device) -> None:
    """p/n is 5e-8 here, below what float16 holds; 65536 p/n is not."""
    rows, weights, labels = loss.tensors(device, (40,))
    (hidden, *taught), (weight, *teacher) = ([t.half() for t in tensors] for tensors in (rows, weights))

    def call(function, h: Tensor, w: Tensor) -> Tensor:
        constant = ([t.to(h.dtype) for t in tensors] for tensors in (taught, teacher))
        return 65536.0 * function([h, *next(constant)], [w, *next(constant)], labels, num_items_in_batch=512_000)

    judge(lambda *leaves: call(loss, *leaves), lambda *leaves: call(loss.reference, *leaves), [0.02 * hidden, weight])


@pytest.mark.parametrize("name, shape", [("cross_entropy", (64, 4000)), ("jsd", (64, 4800)), ("kl_div", (64, 2100))])
def test_float16_survives_gradscalers_factor_without_weights(name, shape, device) -> None:
    """Gradients of a mean are 1e-8 and less, below what float16 holds; 65536 times as much is not."""
    x, target = (torch.randn(shape, device=device).log_softmax(-1).half() for _ in range(2))
    target = {"jsd": target, "kl_div": target.exp()}.get(name, torch.randint(shape[1], shape[:1], device=device))
    ours, reference = getattr(kernels, name), getattr(kernels, f"{name}_reference")
    judge(lambda x: 65536.0 * ours(x, target), lambda x: 65536.0 * reference(x, target), [x])


@losses(lambda loss: loss.has_weights)
@pytest.mark.parametrize("options", [{}, {"reduction": "none"}], ids=["mean", "none"])
def test_autocast_casts_tensors_and_bias_as_a_linear_layer_does(options, loss, device) -> None:
    rows, weights, labels = loss.tensors(device, (11,))
    options = {} if loss.name == "linear_jsd" else options
    bias = "student_bias" if loss.name == "linear_jsd" else "bias"
    tensors = [*rows, *weights, torch.randn(VOCAB, device=device)]
    found = []
    for autocast, dtype in ((False, torch.bfloat16), (True, torch.float32)):
        leaves = [t.to(dtype).requires_grad_() for t in tensors]
        split = leaves[: len(rows)], leaves[len(rows) : -1]
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
            value = loss(*split, labels, **{bias: leaves[-1]}, **options).sum()
            value.backward()
        found.append([value, *(split[i][0].grad for i in (0, 1)), leaves[-1].grad])
    for low, wide in zip(*found, strict=True):
        assert wide.dtype == torch.float32 and torch.equal(wide, low.float())


@pytest.mark.skipif(launcher.INTERPRETED, reason="torch.compile cannot trace the interpreter")
@pytest.mark.parametrize("op", ["linear_cross_entropy", "linear_jsd"])
def test_compiled_products_do_not_read_unwritten_memory(op):
    """Inductor may split addmm into 0 · total + a b, which is NaN if the memory of total held NaN."""
    betas = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
        graphs = [module for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
        betas.extend(node.kwargs.get("beta", 1) for each in graphs for node in each.graph.nodes
                     if node.target is torch.addmm)  # fmt: skip
        return graph.forward

    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    other = {"linear_cross_entropy": (torch.arange(6),), "linear_jsd": (hidden.detach().roll(1, 0), weight.detach())}
    function = getattr(kernels, op)
    loss = torch.compile(lambda h, w: function(h, w, *other[op]), backend=backend, fullgraph=True)(hidden, weight)
    torch.testing.assert_close(loss, function(hidden, weight, *other[op]))
    assert 0 not in betas
