"""transformers' AutoModelForCausalLM, with our kernels in the model it returns."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PreTrainedModel

from ligertune.model.patch import patch


class AutoModelForCausalLM:
    """Loads as `transformers.AutoModelForCausalLM` does, with the same arguments, and patches."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> PreTrainedModel:
        model = transformers.AutoModelForCausalLM.from_pretrained(*args, **kwargs)
        patch(model)
        return model

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> PreTrainedModel:
        model = transformers.AutoModelForCausalLM.from_config(*args, **kwargs)
        patch(model)
        return model
