"""Before the first update policy and reference are the same model: margins are exactly 0, and DPO's loss is log 2.

In 16 bits a product of another shape is rounded in another way, on GPUs nearly always and on CPUs rarely. So the models
here get noise that depends on a token's place in its batch and on the batch's shape: a reference that is computed in
other batches differs on every machine.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.forked_ranks import on_ranks
from support.models.tiny_models import make
from support.quickstart_runs import plan_run
from support.tasks.preference_runs import pairs, settings
from torch.utils._python_dispatch import TorchDispatchMode

from ligertune.data.batching.order import DataOrder
from ligertune.features.preference.reference import indices_of, reference_batches
from ligertune.models.adapters.lora import adapter_off
from ligertune.models.trainable import apply_method
from ligertune.patching.lora.fused_lora import fuse_adapters
from ligertune.planning.options import MethodOptions
from ligertune.run import run

LOG_2 = math.log(2)
ROWS = {
    "packed": {"data.packing": True},
    "padding-free": {"data.packing": False, "data.padding_free": True},
    "padded": {"data.packing": False, "data.padding_free": False, "train.group_by_length": False},
}
REFERENCES = [("full", "precompute"), ("full", "copy"), ("lora", "adapter"), ("lora", "precompute")]
FAST = {("full", "precompute", "packed"), ("full", "precompute", "padded"), ("lora", "adapter", "padding-free")}
CASES = [
    pytest.param(*reference, rows, marks=() if (*reference, rows) in FAST else pytest.mark.slow)
    for reference in REFERENCES
    for rows in ROWS
]


def add_noise_of_shape(model: torch.nn.Module) -> None:
    """Add noise to the embeddings (B, T, E) that is a function of B, T and the token's place."""

    noises: dict[torch.Size, torch.Tensor] = {}  # on the model's device, as CUDA graphs read them

    def add(module: torch.nn.Module, inputs: tuple[torch.Tensor], embedded: torch.Tensor) -> torch.Tensor:
        rows, length = inputs[0].shape
        if embedded.shape not in noises:
            generator = torch.Generator().manual_seed(10_000 * rows + length)
            noises[embedded.shape] = torch.randn(embedded.shape, generator=generator).to(embedded)
        return embedded + 0.1 * module.weight.std() * noises[embedded.shape]

    model.get_input_embeddings().register_forward_hook(add)


def first_lines(folder: Path, **changes: object) -> tuple[dict, dict]:
    """Train one step in bfloat16; return the lines of it and of the evaluation before it."""
    settled = settings(folder, pairs(12), **{"model.dtype": "bfloat16", "train.max_steps": 1, **changes})
    job = plan_run(folder, **settled, **{"eval.eval_on_start": True, "eval.eval_strategy": "no"})
    run(job, lambda line: None, change=add_noise_of_shape)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return next(x for x in lines if "loss" in x), next(x for x in lines if "eval_loss" in x)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGERTUNE_CACHE", str(tmp_path / "cache"))


def expect_log_2(train: dict, evaluation: dict) -> None:
    assert train["step"] == 1 and evaluation["step"] == 0
    assert train["loss"] == pytest.approx(LOG_2, abs=1e-6)
    assert evaluation["eval_loss"] == pytest.approx(LOG_2, abs=1e-6)
    for name in ("rewards/margins", "rewards/chosen", "rewards/rejected"):
        assert (train[name], evaluation[f"eval_{name}"]) == (0, 0)


@pytest.mark.parametrize(("method", "reference", "rows"), CASES)
def test_the_first_loss_is_log_2(method, reference, rows, tmp_path):
    lines = first_lines(tmp_path, **{"method.type": method, "preference.reference": reference, **ROWS[rows]})
    expect_log_2(*lines)


@pytest.mark.slow
def test_the_first_loss_of_two_ranks_is_log_2(tmp_path):
    found = on_ranks(2, lambda rank: first_lines(tmp_path))
    expect_log_2(*found[0])


def test_kl_of_the_first_step_is_0(tmp_path):
    """The mismatched answers of KTO have batches of their own."""
    rows = [{"prompt": row["prompt"], "completion": row["chosen"], "label": n % 2} for n, row in enumerate(pairs(12))]
    folder = tmp_path / "kto"
    folder.mkdir()
    settled = settings(folder, rows, **{"model.dtype": "bfloat16", "train.max_steps": 1, "preference.loss_type": "kto"})
    run(plan_run(folder, **settled), lambda line: None, change=add_noise_of_shape)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    first = next(line for line in lines if "loss" in line)
    assert (first["kl"], first["rewards/chosen"], first["rewards/rejected"], first["loss"]) == (0, 0, 0, 0.5)


class Operations(TorchDispatchMode):
    """Records the names and shapes of torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found.append((str(function), *(tuple(a.shape) for a in args if isinstance(a, torch.Tensor))))
        return function(*args, **(kwargs or {}))


def adapted(dtype: torch.dtype = torch.float32, **options: object) -> torch.nn.Module:
    spec = MethodOptions(type="lora", lora_r=4, lora_target_modules=["q_proj", "down_proj", "lm_head"], **options)
    model = apply_method(make("llama").to(dtype), spec)
    fuse_adapters(model)
    return model.eval()


@torch.no_grad()
def test_a_model_computes_the_same_products_with_its_adapter_switched_off():
    """A base layer's own product may take another kernel than the product to which the low-rank one is added."""
    model = adapted(torch.bfloat16)
    ids = torch.arange(3, 19)[None]
    with Operations() as policy:
        new = model(input_ids=ids).logits
    with adapter_off(model), Operations() as reference:
        off = model(input_ids=ids).logits
    assert policy.found == reference.found
    assert torch.equal(new, off)


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
@torch.no_grad()
def test_a_trained_adapter_is_switched_off_and_on_again(use_dora):
    """It trains all along: FSDP2 keeps what it sees in its first forward."""
    model = adapted(use_dora=use_dora)
    trains = [parameter.requires_grad for parameter in model.parameters()]
    ids = torch.arange(3, 19)[None]
    new = model(input_ids=ids).logits
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "magnitude" in name:
            parameter += 0.3
    trained = model(input_ids=ids).logits
    with adapter_off(model):
        off = model(input_ids=ids).logits
        assert [parameter.requires_grad for parameter in model.parameters()] == trains
    torch.testing.assert_close(off, new, rtol=1e-5, atol=1e-5)
    assert torch.equal(model(input_ids=ids).logits, trained)
    assert (trained - new).abs().max() > 0.5


@pytest.mark.parametrize("examples", [19, 11, 3])
def test_each_example_has_its_value_from_the_first_micro_batch_that_holds_it(examples, tmp_path):
    """Two ranks, and two steps of 8 rows: an epoch ends within a step, or the run does not reach all examples."""
    plan = plan_run(tmp_path, **settings(tmp_path, pairs(12), **{"train.max_steps": 2})).plan
    batching = replace(plan.batching, world_size=2)
    lengths = np.arange(5, 5 + examples)
    order = DataOrder(lengths, total_rows=16, seed=0, batching=batching)

    def batches(rank: int) -> list[tuple[list[np.ndarray], np.ndarray]]:
        dist.init_process_group("gloo")
        return reference_batches(replace(plan, batching=batching), lengths, order)

    ranks = on_ranks(2, batches)
    assert len(ranks[0]) == len(ranks[1])
    # a micro-batch that straddles epochs may hold an example twice
    valued = [np.unique(indices_of(rows)[is_new]) for found in ranks for rows, is_new in found]
    assert sorted(np.concatenate(valued)) == list(range(examples))
    first_step = [order.micro_batches(0, rank) for rank in range(2)]
    for found, trained in zip(ranks, first_step, strict=True):
        for (rows, _), wanted in zip(found, trained, strict=False):
            assert [row.tolist() for row in rows] == [row.tolist() for row in wanted]
