"""linear_cross_entropy against float64: schedules, terms, needed gradients, scales, precision."""

from dataclasses import replace

import pytest
import torch
from ligertune_kernels import LinearLora, launcher, linear_cross_entropy, linear_cross_entropy_reference
from ligertune_kernels.ops.losses.kernels import LossOptions
from ligertune_kernels.ops.losses.tiles import Schedule
from support.covering import every_pair
from support.kernels.judge import DTYPES, judge
from torch._dynamo.testing import CompileCounterWithBackend

ROWS, HIDDEN, VOCAB = 11, 24, 131  # no size a multiple of anything the kernels like

ONE_FLUSH = Schedule("fast", slot=6, buffer=ROWS, flushes=1)
LEAN = Schedule("lean", slot=5, buffer=5, flushes=1, slab=50)  # three chunks of rows, three slabs, the last ones short
LEAN_KEEPING = replace(LEAN, groups=3, kept=8)  # 24 columns are made once
IN_GROUPS = Schedule("fast", slot=4, buffer=ROWS, flushes=1, slab=8, groups=6)  # 48 columns of 131 in dW's memory
SCHEDULES = (
    pytest.param(ONE_FLUSH, id="two slots, one flush"),
    pytest.param(Schedule("fast", slot=3, buffer=6, flushes=2), id="two flushes"),
    pytest.param(Schedule("fast", slot=3, buffer=3, flushes=4), id="four flushes"),
    pytest.param(IN_GROUPS, id="in groups"),
    pytest.param(LEAN, id="lean"),
    pytest.param(LEAN_KEEPING, id="lean, some columns kept"),
)
WAYS = (
    pytest.param(ONE_FLUSH, "mean", id="fast"),
    pytest.param(ONE_FLUSH, "none", id="rows"),
    pytest.param(IN_GROUPS, "mean", id="in groups"),
    pytest.param(LEAN, "mean", id="lean"),
    pytest.param(LEAN_KEEPING, "mean", id="lean, some columns kept"),
)
TERMS = (
    {},
    {"softcap": 2.0, "logit_scale": 0.5},
    {"z_loss": 0.1},
    {"label_smoothing": 0.2},
    {"logit_scale": -0.5},
    {"weighted": True},
    {"weighted": True, "softcap": 2.0, "logit_scale": 3.0, "z_loss": 0.1, "label_smoothing": 0.2},
)


def example(device: torch.device, dtype: torch.dtype = torch.float32, *, leading: tuple[int, ...] = (ROWS,)):
    """Return hidden, weight, bias and labels, a quarter ignored."""
    hidden = torch.randn(*leading, HIDDEN, device=device, dtype=dtype)
    weight = 0.3 * torch.randn(VOCAB, HIDDEN, device=device, dtype=dtype)
    bias = torch.randn(VOCAB, device=device, dtype=dtype)
    labels = torch.randint(VOCAB, leading, device=device)
    labels.view(-1)[1::4] = -100
    return hidden, weight, bias, labels


def agrees(inputs, labels, *, schedule, grads=None, lora_scale=1.0, **options) -> None:
    """Judge inputs (hidden, weight, bias, A and B of LoRA); the last ones may be left out."""

    def call(op, **more):
        def loss(hidden, weight, bias=None, *adapter):
            lora = LinearLora(*adapter, lora_scale) if adapter else None
            return op(hidden, weight, labels, bias, lora=lora, **options, **more)

        return loss

    judge(call(linear_cross_entropy, schedule=schedule), call(linear_cross_entropy_reference), inputs, grads=grads)


@pytest.mark.parametrize("schedule, reduction, dtype", every_pair(SCHEDULES, ("mean", "none"), DTYPES))
def test_agrees_with_float64(schedule, reduction, dtype, device) -> None:
    *tensors, labels = example(device, dtype)
    if dtype is torch.float16:
        schedule = replace(schedule, groups=0)  # as schedule_of has it: the groups would not be as wide as dW
    agrees(tensors, labels, schedule=schedule, reduction=reduction)


@pytest.mark.parametrize(
    "schedule, reduction, terms",
    [*every_pair(WAYS[:2], TERMS), *every_pair(WAYS[2:], TERMS[-1:])],  # a term reaches every schedule in the last one
)
def test_every_term_agrees_with_float64(schedule, reduction, terms, device) -> None:
    hidden, weight, _, labels = example(device, leading=(2, 5))
    options = {"reduction": reduction, **terms}
    if options.pop("weighted", False):
        options["class_weight"] = torch.rand(VOCAB, device=device)
    agrees([hidden, weight], labels, schedule=schedule, **options)


@pytest.mark.parametrize(
    "schedule, reduction, dtype, frozen", every_pair(WAYS, (torch.float32, torch.bfloat16), (False, True))
)
def test_a_low_rank_term_is_exact(schedule, reduction, dtype, frozen, device) -> None:
    """The rank is 3: no size is a multiple of the kernels' sizes."""
    *tensors, labels = example(device, dtype)
    a, b = 0.3 * torch.randn(3, HIDDEN, device=device, dtype=dtype), torch.randn(VOCAB, 3, device=device, dtype=dtype)
    options = {"lora_scale": 0.5, "softcap": 4.0, "reduction": reduction}
    grads = (not frozen, not frozen, not frozen, True, True)
    agrees([*tensors, a, b], labels, schedule=schedule, grads=grads, **options)


@pytest.mark.parametrize("schedule, reduction", WAYS)
@pytest.mark.parametrize("grads", [(True, False, False), (False, True, False), (False, False, True)])
def test_computes_only_the_gradient_that_is_needed(grads, schedule, reduction, device) -> None:
    *tensors, labels = example(device)
    agrees(tensors, labels, schedule=schedule, grads=grads, reduction=reduction)


def test_float16_sums_of_dw_do_not_overflow(device) -> None:
    """One class, rows of 1200: undivided, dW is 128 · 1200 = 153,600, past float16's 65,504; divided it is 1200."""
    hidden = torch.full((128, 8), 1200.0, device=device, dtype=torch.float16)
    weight = torch.zeros(4, 8, device=device, dtype=torch.float16, requires_grad=True)
    linear_cross_entropy(hidden, weight, torch.zeros(128, device=device, dtype=torch.int64)).backward()
    torch.testing.assert_close(weight.grad[0], torch.full_like(weight[0], -900.0))


def test_many_flushes_and_slabs_round_dw_once(device) -> None:
    """A running sum in bf16 over 64 flushes would have four times the error of one product."""
    hidden, weight, _, labels = example(device, torch.bfloat16, leading=(64,))
    truth = weight.double().requires_grad_()
    linear_cross_entropy_reference(hidden.double(), truth, labels).backward()
    lost = []
    for schedule in (Schedule("fast", 64, 64, 1), Schedule("fast", 1, 1, 64), replace(LEAN, slot=24)):
        w = weight.detach().requires_grad_()
        linear_cross_entropy(hidden, w, labels, schedule=schedule).backward()
        lost.append((w.grad.double() - truth.grad).norm())
    assert max(lost) <= 1.1 * lost[0]


@pytest.mark.skipif(launcher.INTERPRETED, reason="torch.compile cannot trace the interpreter")
@pytest.mark.parametrize("options", [{"softcap": 2.0, "label_smoothing": 0.2, "z_loss": 0.1}, {"reduction": "none"}])
def test_two_compiled_graphs_serve_all_numbers_of_rows(options, device):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(linear_cross_entropy, backend=counter, fullgraph=True)
    for n_rows in (ROWS, 7, 19, 4):
        *tensors, labels = example(device, leading=(n_rows,))
        lora = torch.randn(3, HIDDEN, device=device), torch.randn(VOCAB, 3, device=device)
        results = []
        for op in (compiled, linear_cross_entropy):
            hidden, weight, bias, a, b = leaves = [t.detach().clone().requires_grad_() for t in (*tensors, *lora)]
            loss = op(hidden, weight, labels, bias, lora=LinearLora(a, b, 0.5), **options)
            loss.sum().backward()
            results.append([loss.detach(), *(leaf.grad for leaf in leaves)])
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 2
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_operator_of_compiled_calls_describes_its_results(dtype, device):
    """torch's own check: shapes, dtypes and strides of the traced operator are those of its results."""
    hidden, weight, bias, labels = example(device, dtype)
    lora = torch.randn(3, HIDDEN, device=device, dtype=dtype), torch.randn(VOCAB, 3, device=device, dtype=dtype)
    scale = torch.full((), 0.1, device=device)
    parameters = [weight, bias, *lora]
    options = list(map(float, LossOptions().numbers))
    checks = ["test_schema", "test_faketensor"]
    if dtype == torch.float32:  # how it is traced does not depend on the dtype
        checks += ["test_autograd_registration", "test_aot_dispatch_dynamic"]
    for wanted in (  # statistics; the gradients of hidden, weight, bias and LoRA
        [False, *[True] * 5],
        [True, *[False] * 5],
        [False, True, False, False, True, True],
        [True, True, *[False] * 4],
    ):
        arguments = (hidden, parameters, 0.5, [labels, None, scale], options, 1 << 20, False, wanted)
        operator = torch.ops.ligertune_kernels.linear_cross_entropy_chunks.default
        torch.library.opcheck(operator, arguments, test_utils=checks)
