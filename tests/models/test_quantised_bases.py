"""Quantised bases: weights by the formats' formulas, LoRA as on the dense weights, plans, and what is refused."""

import pytest
import torch
from support.models.packed_checkpoints import PACKINGS, write_packed

from ligertune.models.load import build_model, whole_model
from ligertune.models.quantised_bases.packed_linear import PackedLinear
from ligertune.models.read_config import read_config
from ligertune.planning.options import ModelOptions


@pytest.mark.parametrize("name", PACKINGS)
def test_weights_are_those_of_the_layout(name, tmp_path):
    truth = write_packed(tmp_path / "base", PACKINGS[name])
    spec = ModelOptions(model_name_or_path=str(tmp_path / "base"))
    model = build_model(spec, read_config(spec), dtype=torch.float32, device="cpu", seed=0)
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    assert len(packed) == 14
    dense = whole_model(spec, read_config(spec), trained_in="float32")
    weights = dense.state_dict()
    for key, expected in truth.items():
        torch.testing.assert_close(weights[key], expected, rtol=1e-6, atol=1e-7)
