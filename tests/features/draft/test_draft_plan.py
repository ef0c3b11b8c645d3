"""Planned memory and FLOPs of draft heads, against what tensors take and what torch counts."""

import pytest
import torch
from ligertune_kernels import labelled_rows
from support.command_line import overrides
from support.forked_ranks import on_ranks
from support.storages import MadeStorages
from support.tasks.draft_runs import DRAFT, plan_draft
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from ligertune.features.draft.draft_config import draft_config_of
from ligertune.features.draft.draft_head import DraftHead
from ligertune.features.draft.recipe import DraftSpec
from ligertune.features.draft.training import draft_loss, draft_memory
from ligertune.features.draft.training.draft_model import DraftModel
from ligertune.features.draft.training.draft_task import DraftShape
from ligertune.features.output_head import LogitTransform
from ligertune.planning.memory.activation_bytes import ActivationPolicy, MicroBatch, StepBytes
from ligertune.planning.memory.estimate import MemoryEstimate
from ligertune.planning.memory.states import states_of
from ligertune.recipe import load_recipe
from ligertune.training.resolve import plan_for

ROWS, LENGTH = 16, 16  # short documents, whose scores are small
HIDDEN, HEADS, STEPS = 32, 8, 4  # narrow: what references of other ops keep is small beside logits


def model_of(vocab: int, drafted: int, *, loss: str = "eagle", hidden: int = HIDDEN) -> DraftModel:
    config = LlamaConfig(vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=4,
                         num_attention_heads=HEADS, num_key_value_heads=2)  # fmt: skip
    ids = torch.arange(drafted) if drafted < vocab else None
    head = DraftHead(draft_config_of(config, draft_vocab_size=drafted), ids)
    spec = DraftSpec(steps=STEPS, loss=loss, num_speculative_tokens=STEPS)
    return DraftModel(LlamaForCausalLM(config), head, spec, transform=LogitTransform()).train()


@pytest.mark.parametrize(
    "vocab, drafted, loss, chunk, labelled",
    [
        (4096, 1024, "eagle", 1 << 28, ROWS),
        pytest.param(4096, 1024, "eagle", 1 << 20, ROWS, marks=pytest.mark.slow),
        pytest.param(4096, 1024, "acceptance", 1 << 28, ROWS, marks=pytest.mark.slow),
        pytest.param(4096, 1024, "kl", 1 << 28, ROWS, marks=pytest.mark.slow),
        pytest.param(2048, 2048, "eagle", 1 << 28, ROWS, marks=pytest.mark.slow),
        (2048, 2048, "eagle", 1 << 28, ROWS // 4),
    ],
)
def test_memory_of_the_loss_is_what_the_plan_says(vocab, drafted, loss, chunk, labelled, monkeypatch) -> None:
    monkeypatch.setattr(draft_loss, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(draft_memory, "CHUNK_BYTES", chunk)
    model = model_of(vocab, drafted, loss=loss)
    ids = torch.randint(0, vocab, (ROWS, LENGTH))
    labels = ids.clone()
    labels[labelled:] = -100
    rows = labelled_rows(labels, shift=(1,), multiple_of=1)
    with MadeStorages(model) as found:
        model(ids, labels, labelled_rows=rows, use_cache=False).loss.backward()
    shape = DraftShape.of_model(model)
    estimate = MemoryEstimate(
        None, shape.layer, shape.head, ActivationPolicy(fused_mlp=False),
        layers=4, itemsize=4, labelled=1.0, heads=shape.heads,
    )  # fmt: skip
    batch = MicroBatch(ROWS * LENGTH, len(rows), LENGTH, accumulates=False)
    phases = estimate.frozen_model_phases(shape.heads, batch, StepBytes(4, 0, 0, 0))
    largest = max(phases, key=lambda phase: phase.total)
    assert largest.name == "loss"
    # On a CPU references of norms and RoPE keep as much again as the hidden states of a layer, and those of attention
    # scores and weights (H, L, L) of each document.
    references = 4 * STEPS * batch.tokens * (7 * HIDDEN + 2 * HEADS * LENGTH)
    assert found.peak == pytest.approx(largest.total + references, rel=0.06)


LINEAR = (torch.ops.aten.mm, torch.ops.aten.addmm)  # torch counts the whole square of attention, the plan its half


@pytest.mark.parametrize("drafted", [256, 96])
def test_flops_of_the_linear_layers(drafted) -> None:
    model = model_of(256, drafted)
    ids = torch.randint(0, 256, (2, LENGTH))
    with FlopCounterMode(display=False) as counter:
        model(ids, ids, use_cache=False).loss.backward()
    counted = sum(count for op, count in counter.get_flop_counts()["Global"].items() if op in LINEAR)
    assert counted == pytest.approx(DraftShape.of_model(model).flops(tokens=ids.numel(), squared_lengths=0), rel=1e-6)


def test_a_plan_predicts_memory_and_shows_the_head(tmp_path) -> None:
    plan = plan_draft(tmp_path / "run", **{"data.datasets.0.max_samples": 40, "data.max_length": 128}).plan
    assert plan.peak is not None and plan.peak.phase.name == "loss"


def test_a_plan_predicts_memory_of_ranks_that_share_the_model(tmp_path) -> None:
    settings = {"data.datasets.0.max_samples": 40, "parallel.strategy": "fsdp", "train.global_batch_size": 4}
    settings |= {"train.per_device_train_batch_size": 2, "checkpoint.output_dir": tmp_path}
    plan = plan_for(load_recipe(DRAFT, overrides=overrides(settings)[1::2]), for_show=True, processes=2).plan
    assert (plan.strategy, plan.memory.shards) == ("fsdp", 2)


WIDE = 128  # layers whose weights are large beside a few tokens


def gathered_by_fsdp(vocab: int, drafted: int, shape: tuple[int, int], reshards: bool) -> dict[str, float]:
    """Return the bytes at the peak of two steps by kind, of one of two ranks, as torch's tracker counts them."""
    model = model_of(vocab, drafted, hidden=WIDE)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    for module in (*model.base_model.model.layers, model):  # as accelerate wraps the classes of _no_split_modules
        fully_shard(module, mesh=mesh, reshard_after_forward=reshards)
    optimizer = torch.optim.AdamW(model.draft_head.parameters())
    ids = torch.randint(0, vocab, shape)
    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs((ids,))
    with tracker:
        for _ in range(2):  # the first step has no optimizer states before its end
            model(ids, ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            tracker.reset_mod_stats()
    (found,) = tracker.get_tracker_snapshot("peak").values()
    torch.distributed.destroy_process_group()
    return {getattr(kind, "name", kind): size for kind, size in found.items()}


@pytest.mark.parametrize("reshards", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "vocab, drafted, shape, phase",
    [
        (4096, 64, (1, 8), "gather"),
        (4096, 4096, (1, 8), "gather again"),
        pytest.param(4096, 4096, (16, 24), "loss", marks=pytest.mark.slow),
    ],
)
def test_memory_of_a_rank_that_shares_the_model_is_what_fsdp_gathers(vocab, drafted, shape, phase, reshards) -> None:
    (found,) = on_ranks(1, lambda rank: gathered_by_fsdp(vocab, drafted, shape, reshards))
    model = model_of(vocab, drafted, hidden=WIDE)
    sizes = DraftShape.of_model(model)
    recipe = load_recipe(DRAFT, overrides=["parallel.strategy=fsdp"])
    states = states_of(recipe, sizes.parameters, "float32", strategy="fsdp", world_size=2)
    assert states.weights == pytest.approx(found["SHARDED_PARAM"], rel=1e-3)
    estimate = MemoryEstimate(
        states, sizes.layer, sizes.head, ActivationPolicy(fused_mlp=False),
        layers=4, itemsize=4, labelled=1.0, heads=sizes.heads, shards=2, reshards=reshards,
    )  # fmt: skip
    batch = MicroBatch(shape[0] * shape[1], shape[0] * (shape[1] - 1), shape[1], accumulates=False)
    step = StepBytes(4, states.gradients, 0, 0)
    phases = {one.name: one for one in estimate.frozen_model_phases(sizes.heads, batch, step)}
    if not reshards and phase == "gather again":
        phase = "gather"  # the root is gathered once
    assert phases[phase].working == pytest.approx(found["UNSHARDED_PARAM"] + found["ALL_GATHER"], rel=0.01)
    assert max(phases.values(), key=lambda one: one.total).name == phase
