"""Planned FLOPs and memory of Medusa training, against what torch counts and measurements."""

import pytest
import torch
import transformers
from ligertune_kernels import labelled_rows
from support.models.tiny_models import batch, make
from support.quickstart_runs import bare_recipe
from support.storages import MadeStorages
from support.tasks.medusa_runs import MEDUSA
from torch.utils.flop_counter import FlopCounterMode

from ligertune.errors import UserError
from ligertune.features.medusa.medusa_model import attach_heads
from ligertune.features.medusa.medusa_task import MedusaShape
from ligertune.features.medusa.recipe import MedusaSpec
from ligertune.patching.patch import patch
from ligertune.planning.memory.activation_bytes import CUBLAS_WORKSPACE, ActivationPolicy, MicroBatch, StepBytes
from ligertune.planning.memory.estimate import MemoryEstimate
from ligertune.planning.memory.fit import largest_fits
from ligertune.planning.memory.states import states_of
from ligertune.recipe import load_recipe
from ligertune.training.resolve import plan_for

GIB, TOKENS = 2**30, 1024
LLAMA_8B = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8}  # fmt: skip
WIDTH = 1024  # much larger than the vocabulary: plain torch holds more logits than the kernels
WIDE, NARROW = ({"hidden_size": WIDTH, "intermediate_size": mlp} for mlp in (4096, 64))


@pytest.mark.parametrize(
    ("sizes", "medusa", "name"),
    [
        pytest.param(WIDE, {"num_heads": 2}, "frozen model", marks=pytest.mark.slow),
        (NARROW, {"num_heads": 4}, "loss"),
        pytest.param(NARROW, {"num_heads": 6}, "loss", marks=pytest.mark.slow),
        pytest.param(NARROW, {"num_heads": 3, "num_layers": 3}, "loss", marks=pytest.mark.slow),
        (NARROW, {"num_heads": 3, "lm_head": "own"}, "loss"),
    ],
    ids=["a wide model", "four heads", "six heads", "three blocks", "own output heads"],
)
def test_memory_of_stage_1_is_what_the_plan_says(sizes, medusa, name):
    base = make("llama", **sizes, max_position_embeddings=TOKENS)
    patch(base, loss="torch")
    model = attach_heads(base, MedusaSpec(**medusa), fused=True).train()
    ids = torch.randint(3, 128, (1, TOKENS))
    labels = ids.clone()
    labels[:, : TOKENS // 4] = -100
    rows = labelled_rows(labels, shift=model.shifts, multiple_of=1)
    with MadeStorages(model) as found:
        model(
            input_ids=ids, labels=labels, position_ids=torch.arange(TOKENS)[None], labelled_rows=rows, use_cache=False
        )
    shape = MedusaShape.of_heads(model)
    batch = MicroBatch(TOKENS, len(rows), TOKENS, accumulates=False)
    estimate = MemoryEstimate(
        None, shape.layer, shape.head, ActivationPolicy(fused_mlp=False),
        layers=1, itemsize=4, labelled=1.0, heads=shape.heads,
    )  # fmt: skip
    planned = {
        phase.name: phase.total for phase in estimate.frozen_model_phases(estimate.heads, batch, StepBytes(4, 0, 0, 0))
    }
    assert max(planned["frozen model"], planned["loss"]) == planned[name]
    # On a CPU the rows with a target are copied for each head; a GPU would have to synchronise for that.
    at_once = 1 if shape.heads.own_projection else shape.heads.number
    picked = at_once * len(rows) * WIDTH * 4 if name == "loss" else 0
    assert found.peak == pytest.approx(planned[name] + picked, rel=0.05)


MEASURED = {  # (stage, heads, tokens): GiB on an H100 80GB HBM3, scripts/bench medusa, 2026-11-22 and 23
    (1, 5, 8192): 16.61, (1, 5, 131072): 30.06,
    (1, 3, 16384): 17.1, (1, 3, 131072): 29.9, (2, 5, 4096): 60.6, (2, 5, 32768): 64.6, (2, 3, 4096): 60.4,
    (2, 3, 32768): 64.4,
}  # fmt: skip


@pytest.fixture(scope="module")
def shapes() -> dict[tuple[int, int], MedusaShape]:
    """Llama-3-8B with heads, by stage and number."""
    found = {}
    for stage, number in {key[:2] for key in MEASURED}:
        with torch.device("meta"):
            config = transformers.LlamaConfig(**LLAMA_8B)
            base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            spec = MedusaSpec(num_heads=number, stage=stage)
            found[stage, number] = MedusaShape.of_heads(attach_heads(base, spec, fused=True))
    return found


@pytest.mark.parametrize("point", MEASURED, ids=str)
def test_the_plan_matches_the_measurements(point, shapes):
    stage, number, tokens = point
    shape = shapes[stage, number]
    states = states_of(bare_recipe(), shape.parameters, "bfloat16")
    estimate = MemoryEstimate(
        states, shape.layer, shape.head, ActivationPolicy(attention="varlen", checkpointing=stage == 2),
        layers=shape.num_hidden_layers, itemsize=2, labelled=0.75, in_front=shape.in_front,
        heads=shape.heads, workspace=CUBLAS_WORKSPACE,
    )  # fmt: skip
    planned = estimate.peak(1, tokens, accumulates=False, memory=80 * GIB).total
    assert planned == pytest.approx(MEASURED[point] * GIB, rel=0.005)


@pytest.mark.parametrize("change", ["kernels.loss=torch", "parallel.strategy=fsdp"])
def test_memory_that_is_not_predicted_is_reported(change, tmp_path):
    recipe = load_recipe(MEDUSA, overrides=[change, f"checkpoint.output_dir={tmp_path}"])
    plan = plan_for(recipe, for_show=True, memory_gib=80, gpus=2).plan
    assert plan.peak is None
    with pytest.raises(UserError, match="memory is predicted for one process or ddp"):
        largest_fits(plan)


def test_memory_with_a_teacher_is_not_predicted():
    spec = MedusaSpec(num_heads=2, stage=2, self_distillation=True)
    assert MedusaShape.of_heads(attach_heads(make("llama"), spec, fused=True)).layer is None


LINEAR = (torch.ops.aten.mm, torch.ops.aten.addmm)  # torch counts the whole square of attention, the plan its half


@pytest.mark.parametrize("lm_head", ["shared", "own"])
@pytest.mark.parametrize("stage", [1, 2])
def test_flops_of_the_linear_layers(stage, lm_head):
    spec = MedusaSpec(num_heads=3, num_layers=2, stage=stage, lm_head=lm_head)
    model = attach_heads(make("llama"), spec, fused=False)
    made = batch()
    with FlopCounterMode(display=False) as counter:
        model(made["input_ids"], made["labels"], use_cache=False).loss.backward()
    counted = sum(count for op, count in counter.get_flop_counts()["Global"].items() if op in LINEAR)
    expected = MedusaShape.of_heads(model).flops(tokens=made["input_ids"].numel(), squared_lengths=0)
    assert counted == pytest.approx(expected, rel=1e-6)
