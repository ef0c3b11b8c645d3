"""Models that see, with their language model in float8 (emulated): the tower and its projector stay exact."""

from __future__ import annotations

import copy
from importlib.util import find_spec

import pytest
import tiny_vlms
from asked_rows import asked
from batches_of import batch_of, training

from ligertune.models.float8 import to_float8
from ligertune.patching.patch import patch
from ligertune.planning.options import VisionOptions
from ligertune.vision.families import family_of, part_of
from ligertune.vision.freeze import prepare_vision

needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao: pip install 'ligertune[quant]'")


@needs_torchao
@pytest.mark.parametrize("family", tiny_vlms.FAMILIES)
def test_only_what_writes_multiplies_in_float8(family, prepared_for, pictures, tokenizer_of, reader_of):
    exact = tiny_vlms.make(family, tokenizer_of(family))
    prepare_vision(exact, VisionOptions(freeze_projector=False))
    ours = copy.deepcopy(exact)
    patch(ours)
    to_float8(ours)
    rows = prepared_for(family, [asked("<image>\nWhat is this?", "Yes. It is a red square.", pictures["red"])])
    batch = batch_of(rows, reader_of(family), (0,), multiple_of=16)
    found, truth = training(ours, batch), training(exact, batch)
    assert 1e-6 < abs(float(found[0] / truth[0]) - 1) < 2e-2
    assert found[1].keys() == truth[1].keys()
    quantised = [name for name, module in ours.named_modules() if type(module).__name__ == "Float8Linear"]
    assert {part_of(family_of(ours.config), f"{name}.weight") for name in quantised} == {"language_model"}
    assert not any("lm_head" in name for name in quantised)
