"""Packed rows on a GPU: the same numbers as single documents within rounding, and no waiting for the device."""

import warnings

import pytest
import torch
from ligertune_kernels import labelled_rows
from support.models import tiny_models
from support.tasks.packed_rows import CAPPED, FAMILIES, UNCAPPED, history, make, packed, separate

from ligertune.attention.document_isolation import document_leak
from ligertune.attention.torch_attention import deterministic_backward, prefer_flash
from ligertune.patching.packing_checks import install_packing_checks
from ligertune.patching.patch import patch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.version.hip is not None, reason="torch's varlen attention is for NVIDIA GPUs"),
]
MULTIPLE_OF = {"document_attention": 16, "varlen": 16, "flex_attention": 128, "per_document": 16}
CASES = [
    *((family, "document_attention") for family in FAMILIES),
    *((family, "varlen") for family in UNCAPPED),
    *((family, "per_document") for family in ("llama", "mistral", CAPPED)),
    *((family, "flex_attention") for family in ("llama", "mistral", CAPPED)),  # each takes half a minute to compile
]


def on_gpu(family: str, implementation: str, dtype: torch.dtype = torch.bfloat16):
    prefer_flash()
    model = make(family, attn_implementation=implementation).to("cuda", dtype)
    install_packing_checks(model)
    return model


def gradients_of(model, batches) -> torch.Tensor:
    """All gradients in one vector, of the mean loss over the batches' trained tokens."""
    n_targets = sum(tiny_models.trained_tokens(batch["labels"]) for batch in separate())
    for batch in batches:
        model(**batch, num_items_in_batch=n_targets, use_cache=False).loss.backward()
    return torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(("family", "implementation"), CASES)
def test_bfloat16_is_as_close_to_fp32_packed_as_alone(family, implementation):
    truth = gradients_of(on_gpu(family, "eager", torch.float32), separate(device="cuda"))
    alone = gradients_of(on_gpu(family, "eager"), separate(device="cuda"))
    row = packed(device="cuda", multiple_of=MULTIPLE_OF[implementation])
    together = gradients_of(on_gpu(family, implementation), [row])
    errors = [float((found - truth).norm() / truth.norm()) for found in (together, alone)]
    assert errors[0] <= 1.2 * errors[1] + 1e-3


@pytest.mark.parametrize("implementation", ["document_attention", "varlen"])
def test_no_gradient_is_copied_on_the_way_to_a_projection(implementation):
    model = on_gpu("llama", implementation)
    patch(model)
    nodes = history(model(**packed(device="cuda"), num_items_in_batch=10, use_cache=False).loss)
    assert not nodes & {"SelectBackward0", "SliceBackward0", "CloneBackward0", "CatBackward0"}
    assert "MmBackward0" in nodes


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("implementation", ["document_attention", "flex_attention", "per_document"])
def test_fp32_equals_single_documents(family, implementation):
    truth = gradients_of(on_gpu(family, "eager", torch.float32), separate(device="cuda"))
    row = packed(device="cuda", multiple_of=MULTIPLE_OF[implementation])
    found = gradients_of(on_gpu(family, implementation, torch.float32), [row])
    assert float((found - truth).norm() / truth.norm()) < 1e-4  # tf32 is off; sums are taken in other orders


@pytest.mark.parametrize("implementation", MULTIPLE_OF)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_documents_do_not_see_each_other(family, implementation):
    assert document_leak(on_gpu(family, implementation), multiple_of=MULTIPLE_OF[implementation]) == 0.0


def waits_for_the_device(implementation: str, layers: int) -> list[str]:
    """Each wait of the host in a forward and backward of a patched model."""
    prefer_flash()
    model = make("mistral", attn_implementation=implementation, num_hidden_layers=layers).to("cuda", torch.bfloat16)
    install_packing_checks(model)
    patch(model)
    row = packed(device="cuda")
    row["labelled_rows"] = labelled_rows(row["labels"].cpu(), shift=1).cuda()
    model(**row, num_items_in_batch=40, use_cache=False).loss.backward()  # compiles
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            model(**row, num_items_in_batch=40, use_cache=False).loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [str(warning.message) for warning in said if "called a synchronizing" in str(warning.message)]


@pytest.mark.parametrize("implementation", ["document_attention", "varlen", "per_document"])
def test_no_layer_waits_for_the_device(implementation):
    """transformers looks at the positions once a forward; more layers do not wait more often."""
    few, many = (waits_for_the_device(implementation, layers) for layers in (2, 5))
    assert len(few) == len(many) <= 1, many


@pytest.mark.parametrize("implementation", ["document_attention", "varlen", "flex_attention"])
def test_the_backward_gives_the_same_bits_each_time(implementation):
    found = []
    for _ in range(3):
        model = on_gpu("llama", implementation)
        row = packed(device="cuda", multiple_of=128)
        loss = model(**row, num_items_in_batch=40, use_cache=False).loss
        with deterministic_backward(True, implementation):
            loss.backward()
        found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
