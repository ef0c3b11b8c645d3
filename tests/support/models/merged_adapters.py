"""Merged models of adapters on 4-bit weights."""

from pathlib import Path

import peft
import torch
from transformers import AutoModelForCausalLM

from ligertune.models.load import whole_model
from ligertune.models.read_config import read_config
from ligertune.models.save import saved_spec


def expect_logits_of_adapter(merged: Path, adapter: Path) -> None:
    """Require that a merged model in float32 has the logits of plain PEFT on its base in NF4."""
    spec = saved_spec(str(adapter), trust_remote_code=False)
    base = whole_model(spec, read_config(spec), stored_as="nf4")
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected = peft.PeftModel.from_pretrained(base, adapter).eval()(ids).logits
        found = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
