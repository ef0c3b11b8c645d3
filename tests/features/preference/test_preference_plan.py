"""The memory plan of preference runs: tokens and labels of pairs of different lengths."""

import pytest
from support.data.collated_sizes import check_plan, collated
from support.quickstart_runs import plan_run
from support.tasks.preference_runs import pairs, settings

SIZES = {
    "train.per_device_train_batch_size": 4,
    "train.gradient_accumulation_steps": 1,
    "train.num_train_epochs": 2,
    "data.val_split": 0.0,
}
REFERENCES = {
    "precompute": {"preference.reference": "precompute"},
    "copy": {"preference.reference": "copy"},
    "adapter": {"method.type": "lora", "preference.reference": "adapter"},
}
LAYOUTS = {
    "padding-free": {"data.packing": False, "data.padding_free": True},
    "padded": {"data.packing": False, "data.padding_free": False},
    "grouped": {"data.packing": False, "data.padding_free": False, "train.group_by_length": True},
    "packed": {"data.packing": True},
}


@pytest.mark.parametrize("reference", REFERENCES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_plan_has_the_largest_micro_batch_of_pairs(reference, layout, tmp_path):
    changes = {**SIZES, **REFERENCES[reference], **LAYOUTS[layout]}
    job = plan_run(tmp_path, **settings(tmp_path, pairs(30), **changes))
    check_plan(job)
    assert job.plan.largest_batch.labels < 0.8 * job.plan.largest_batch.tokens  # prompts have no labels


def test_a_padding_free_micro_batch_of_pairs_is_smaller_than_its_longest_sequences(tmp_path):
    changes = {**SIZES, **REFERENCES["precompute"], **LAYOUTS["padding-free"]}
    job = plan_run(tmp_path, **settings(tmp_path, pairs(30), **changes))
    plan = job.plan
    shapes, labels = collated(job)
    assert plan.largest_batch.tokens == max(length for _, length in shapes)
    assert plan.largest_batch.tokens < 0.95 * plan.batching.micro_batch_size * plan.row_length
    peak = plan.memory.peak(1, max(length for _, length in shapes), accumulates=False, labels=max(labels),
                            memory=plan.machine.memory_bytes)  # fmt: skip
    assert plan.peak.total == peak.total
