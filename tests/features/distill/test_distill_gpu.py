"""Distillation on a GPU: kernels in bfloat16, padding-free rows and a teacher of another dtype or place."""

import pytest
from support.tasks.distill_runs import distil, save_student, values

pytestmark = pytest.mark.gpu

WAYS = {
    "packed": {"data.packing": True},
    "without padding": {"data.padding_free": True},
    "float16 teacher": {"distill.teacher_dtype": "float16"},
    "offloaded teacher": {"distill.teacher_offload": True},
    "reverse_kl": {"distill.loss": "reverse_kl"},
    "lora": {"method.type": "lora", "method.lora_r": 4},
}


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    return save_student(tmp_path_factory.mktemp("student"))


@pytest.mark.parametrize("way", WAYS)
def test_losses_with_kernels_are_those_without(way, student, tmp_path):
    changes = {**WAYS[way], "model.dtype": "bfloat16"}
    found = [
        distil(tmp_path / str(enabled), student, **changes, **{"kernels.enabled": enabled})
        for enabled in ("auto", False)
    ]
    for key in ("loss", "kl"):
        assert values(found[0], key) == pytest.approx(values(found[1], key), rel=1e-2)
    assert [line["note"] for line in found[0] if "note" in line] == []
