"""The plan proposes to offload checkpointed layers' inputs where that saves memory and takes no time."""

from dataclasses import replace

import pytest
import torch
import transformers
from support.quickstart_runs import bare_recipe, recipe_for

from ligertune.models.shape import read_shape
from ligertune.planning.batch_layout import BatchShape
from ligertune.planning.make_plan import REACHED_SHARE_OF_PEAK
from ligertune.planning.memory.activation_bytes import ActivationPolicy
from ligertune.planning.memory.activation_policy import suggest_offload
from ligertune.planning.memory.estimate import MemoryEstimate
from ligertune.planning.memory.states import states_of
from ligertune.training.resolve import plan_for

LLAMA_8B = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8}  # fmt: skip
ROWS, LENGTH, GIB = 2, 32_768, 2**30


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return recipe_for(tmp_path_factory.mktemp("plan"), **{"data.packing": True, "train.gradient_checkpointing": True})


@pytest.fixture(scope="module")
def plan(recipe):
    """Two rows of 32,768 tokens of Llama-3-8B, on an H100 with 60 GiB free."""
    plan = plan_for(recipe, for_show=True).plan
    with torch.device("meta"):
        config = transformers.LlamaConfig(**LLAMA_8B)
        shape = read_shape(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
    states = states_of(bare_recipe("lora"), shape.parameters, "bfloat16")
    policy = ActivationPolicy(attention="document_attention", checkpointing=True)
    memory = MemoryEstimate(states, shape.layer, shape.head, policy, layers=32, itemsize=2, labelled=1.0)
    machine = replace(plan.machine, device="cuda", peak_flops=989e12, world_size=1, memory_bytes=60 * GIB)
    rows = replace(plan.rows, length=LENGTH)
    batching = replace(plan.batching, micro_batch_size=ROWS)
    batch = BatchShape(ROWS, LENGTH)
    changes = {
        "machine": machine, "memory": memory, "rows": rows, "batching": batching, "largest_batch": batch
    }  # fmt: skip
    return replace(plan, notes=(), n_parameters=shape.n_parameters, n_active=None, **changes)


def suggestions(plan, recipe, **train):
    changed = recipe.model_copy(update={"train": recipe.train.model_copy(update=train)})
    return suggest_offload(plan, changed, REACHED_SHARE_OF_PEAK).notes


def test_the_note_says_what_it_saves_and_costs(plan, recipe):
    (note,) = suggestions(plan, recipe)
    inputs = 32 * ROWS * LENGTH * 4096 * 2
    assert f"for {inputs / GIB:.2f} GiB of pinned host memory" in note
    assert note.startswith("train.gradient_checkpointing: offload would need ")
    saved = float(note.split(" need ")[1].split()[0])
    assert 0.8 * inputs / GIB < saved < inputs / GIB


@pytest.mark.parametrize(
    "machine",
    [{"device": "cpu"}, {"peak_flops": None}, {"world_size": 2}, {"peak_flops": 989e13}, {"memory_bytes": 2000 * GIB}],
    ids=["cpu", "unknown peak", "two processes", "copies are slower", "no checkpointing is needed"],
)
def test_other_machines_get_no_note(machine, plan, recipe):
    assert not suggestions(replace(plan, machine=replace(plan.machine, **machine)), recipe)


@pytest.mark.parametrize(
    "train",
    [{"gradient_checkpointing": False}, {"gradient_checkpointing": "offload"}, {"fp8": True}, {"torch_compile": True}],
    ids=str,
)
def test_other_recipes_get_no_note(train, plan, recipe):
    assert not suggestions(plan, recipe, **train)


def test_little_memory_is_not_worth_a_note(plan, recipe):
    full = replace(plan, machine=replace(plan.machine, memory_bytes=GIB))  # too little without checkpointing
    assert suggestions(full, recipe)
    assert not suggestions(replace(full, largest_batch=BatchShape(ROWS, 64)), recipe)
