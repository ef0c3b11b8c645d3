"""gated_delta_rule of long rows on Hopper, where the scans are Gluon kernels, against the reference in float64."""

import pytest
import torch
from ligertune_kernels import gated_delta_rule, gated_delta_rule_reference
from ligertune_kernels.launcher import chip_of
from ligertune_kernels.ops.recurrence.hopper_scans import CHUNK, runs_hopper_scans
from ligertune_kernels.ops.recurrence.tiles import PART, WARPGROUPS
from support.kernels.attention_runs import documents_of
from support.kernels.judge import ONE_ROUNDING
from support.kernels.recurrence_loops import rule_with_gradients

pytestmark = pytest.mark.gpu

ROUNDINGS = 8  # at most as many lie between an input and a gradient
BATCHES = {
    "one document": (1, (2500,)),
    "two rows": (2, (2048,)),
    "documents over parts of a row, within a chunk, and as long as it": (1, (PART - 24, 30, 500, 1, 7, 64, 64, 1700)),
    "short documents": (1, (13,) * 200),
}


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    if not WARPGROUPS.holds(chip_of(torch.device("cuda"))):
        pytest.skip("no Hopper GPU")


def inputs(batch: int, n_tokens: int, dtype: torch.dtype, decay: float) -> list[torch.Tensor]:
    """Return query, key and value, views of one projection, decay and beta."""
    generator = torch.Generator("cuda").manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=dtype)

    joined = made(batch, n_tokens, 2 + 2 + 4, 128)
    logs = -decay * torch.rand(batch, n_tokens, 4, generator=generator, device="cuda")
    return [*joined.split((2, 2, 4), 2), logs, made(batch, n_tokens, 4).sigmoid()]


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("dtype, decay", [(torch.bfloat16, 0.05), (torch.float16, 5.0)])
def test_agrees_with_the_reference(name, dtype, decay) -> None:
    batch, lengths = BATCHES[name]
    leaves = inputs(batch, sum(lengths), dtype, decay)
    assert runs_hopper_scans(chip_of(leaves[0].device), *leaves[:3])
    documents = None if len(lengths) == 1 else documents_of(lengths, "cuda")
    grad = torch.randn_like(leaves[2])
    truth = rule_with_gradients(gated_delta_rule_reference, [t.double() for t in leaves], grad, documents)
    found = rule_with_gradients(gated_delta_rule, leaves, grad, documents)
    for ours, expected in zip(found, truth, strict=True):
        error = (ours.double() - expected).abs().max()
        assert error <= ROUNDINGS * ONE_ROUNDING[dtype] * expected.abs().max()
    assert all(
        torch.equal(*pair)
        for pair in zip(found, rule_with_gradients(gated_delta_rule, leaves, grad, documents), strict=True)
    )


@pytest.mark.parametrize("change", ["heads apart", "rows at odd addresses", "float32", "two rows that end in a chunk"])
def test_other_rows_take_the_triton_kernels(change) -> None:
    n_tokens = 2048 + 5 * (change == "two rows that end in a chunk")
    leaves = inputs(2, n_tokens, torch.bfloat16, 0.05)
    query = leaves[0]
    if change == "heads apart":
        query = query.transpose(1, 2).contiguous().transpose(1, 2)
    elif change == "rows at odd addresses":
        query = torch.nn.functional.pad(query.flatten(), (1, 0))[1:].view_as(query)
    elif change == "float32":
        query = query.float()
    assert (n_tokens % CHUNK.value == 0) == (change != "two rows that end in a chunk")
    assert not runs_hopper_scans(chip_of(query.device), query)
