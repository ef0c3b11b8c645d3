"""Before its first step the policy is the reference: in bfloat16, too, their log-probabilities have the same bits."""

import math

import pytest
from support.tasks.preference_runs import pairs, train_pairs

ROWS = pairs(26)
SETTINGS = {
    "model.dtype": "bfloat16",
    "data.datasets.0.max_samples": 26,
    "data.val_split": 0.2,
    "train.global_batch_size": 8,
    "train.per_device_train_batch_size": 2,
    "train.max_steps": 2,
    "train.learning_rate": 1e-3,
}
LORA = {"method.type": "lora", "method.lora_r": 4, "kernels.lora": True}
REFERENCES = {
    "precompute": {},
    "copy": {"preference.reference": "copy"},
    "adapter": LORA,
    "precompute, LoRA": {**LORA, "preference.reference": "precompute"},
    "adapter, peft's layers": {**LORA, "kernels.lora": False},
}
LAYOUTS = {
    "padded": {"data.padding_free": False},
    "padding-free": {"data.padding_free": True},
    "packed": {"data.packing": True, "data.max_length": 256, "data.max_dropped": 1},
}


IN_CI = {("precompute", "padding-free"), ("precompute, LoRA", "packed"), ("adapter", "padded")}
CASES = [
    pytest.param(reference, layout, marks=() if (reference, layout) in IN_CI else pytest.mark.slow)
    for reference in REFERENCES
    for layout in LAYOUTS
]


@pytest.mark.parametrize("reference, layout", CASES)
def test_the_first_loss_is_that_of_equal_models(reference, layout, tmp_path):
    first, *_ = train_pairs(tmp_path, ROWS, **SETTINGS, **REFERENCES[reference], **LAYOUTS[layout])[1]
    assert first["rewards/chosen"] == first["rewards/rejected"] == first["rewards/margins"] == 0
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
