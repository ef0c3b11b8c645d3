"""A patched model computes what the unpatched one does: the loss and the gradient of every parameter."""

import copy
from itertools import product

import pytest
import torch
from support.models import tiny_models
from support.same_training import FP32, assert_same_training, losses_and_gradients, relative_error

from ligertune.patching.patch import patch

# heads, scaling, soft caps, ties, experts, packed MLPs, partial and interleaved rotation, q/k norms, unknown norms
FAMILIES = tuple(tiny_models.FAMILIES)


# On a GPU the kernels themselves run, on odd sizes. Atomics of torch's own backward move gradients by 1e-5.
GPU_FAMILIES, ON_GPU = ("llama", "gemma2", "mixtral"), {"rows": 3, "length": 37, "device": "cuda"}
GPU_TOLERANCE = 3e-5  # of the largest gradient


def pair(family, *, device="cpu", **changes):
    plain = tiny_models.make(family, **changes).to(device)
    patched = copy.deepcopy(plain)
    report = patch(patched)
    assert device == "cpu" or report.backend == "triton"
    return patched, plain


def on_gpu(families, *axes):
    """Return (family, *axes, device): on a CPU all families, on a GPU some."""
    rows = [(*row, "cpu") for row in product(families, *axes)]
    return rows + [pytest.param(*row, "cuda", marks=pytest.mark.gpu) for row in product(GPU_FAMILIES, *axes)]


COUNTS = (None, 31, torch.tensor(31))


@pytest.mark.parametrize(("family", "counted"), zip(FAMILIES, COUNTS * len(FAMILIES), strict=False), ids=str)
def test_loss_and_every_gradient_equal_the_unpatched_ones(family, counted):
    options = {} if counted is None else {"num_items_in_batch": counted}
    assert_same_training(*pair(family), tiny_models.batch(), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("counted", [None, 31])
@pytest.mark.parametrize("family", GPU_FAMILIES)
def test_gradients_on_a_gpu_equal_the_unpatched_ones(family, counted):
    options = {} if counted is None else {"num_items_in_batch": counted}
    assert_same_training(*pair(family, device="cuda"), tiny_models.batch(**ON_GPU), tolerance=GPU_TOLERANCE, **options)


@pytest.mark.parametrize("loss", ["cross_entropy", "torch"])
@pytest.mark.parametrize("counted", [None, 31])
def test_the_other_losses_equal_the_unpatched_one(loss, counted):
    plain = tiny_models.make("gemma2")
    patched = copy.deepcopy(plain)
    patch(patched, loss=loss)
    options = {} if counted is None else {"num_items_in_batch": counted}
    assert_same_training(patched, plain, tiny_models.batch(), **options)


def test_shift_labels_are_used_unchanged():
    patched, plain = pair("llama")
    batch = tiny_models.batch()
    shift_labels = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    assert_same_training(patched, plain, batch, shift_labels=shift_labels)
    assert_same_training(patched, plain, batch, shift_labels=torch.full_like(shift_labels, 5))


def test_a_switch_patches_one_kind_of_layer():
    for switch in ("rope", "norm", "mlp"):
        plain = tiny_models.make("llama")
        patched = copy.deepcopy(plain)
        others = {"rope": False, "norm": False, "mlp": False, switch: True}
        applied = {row.kernel for row in patch(patched, loss="torch", **others).rows if row.applied}
        assert applied == {{"rope": "apply_rope", "norm": "rms_norm", "mlp": "swiglu"}[switch]}
        assert_same_training(patched, plain, tiny_models.batch())


@pytest.mark.parametrize("family", FAMILIES)
def test_evaluation_gives_the_same_loss_and_logits(family):
    patched, plain = (model.eval() for model in pair(family))
    with torch.no_grad():
        found, expected = patched(**tiny_models.batch()), plain(**tiny_models.batch())
    torch.testing.assert_close(found.loss, expected.loss, rtol=FP32, atol=0)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("family", "device"), on_gpu(FAMILIES))
def test_generation_gives_the_same_tokens(family, device):
    patched, plain = (model.eval() for model in pair(family, device=device, output_router_logits=False))
    prompt = tiny_models.batch(device=device)["input_ids"][:, :6]
    settings = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    assert torch.equal(patched.generate(prompt, **settings), plain.generate(prompt, **settings))


@pytest.mark.parametrize(
    ("family", "autocast", "device"), on_gpu(["llama", "gemma2", "phi3", "granite", "mixtral"], [False, True]), ids=str
)
def test_bfloat16_is_as_close_to_fp32_as_without_kernels(family, autocast, device):
    """autocast: of float32 weights, instead of bfloat16 weights.

    In a mixture each token goes to all experts. Otherwise rounding can change the experts of a token whose router
    probabilities are nearly equal, and the error is that of the choice.
    """
    patched, plain = pair(family, device=device, **({"num_experts_per_tok": 4} if family == "mixtral" else {}))
    batch = tiny_models.batch(**(ON_GPU if device == "cuda" else {}))
    loss, truth = losses_and_gradients(plain, batch)
    off, errors = [], []
    for model in (patched, plain):
        model = model if autocast else model.bfloat16()
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            found, gradients = losses_and_gradients(model, batch)
        off.append((found - loss).abs() / loss)
        errors.append(relative_error(gradients, truth))
    assert errors[0] <= 1.1 * errors[1] + 1e-3  # two roundings of the same numbers differ by chance
    assert off[0] <= off[1] + 1e-3
    assert device == "cuda" or errors[0] < 0.03


@pytest.mark.gpu
def test_it_compiles_on_a_gpu_without_a_graph_break():
    patched, _ = pair("llama", device="cuda")
    patched, batch = patched.bfloat16(), tiny_models.batch(**ON_GPU)
    expected = patched(**batch).loss
    loss = torch.compile(patched, fullgraph=True)(**batch).loss
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=0)
