"""transformers' AutoModelForCausalLM and AutoModelForImageTextToText; the models they return run our kernels."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PreTrainedModel

from ligertune.patching.patch import patch


class _PatchedAuto:
    auto_class: type

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> PreTrainedModel:
        model = cls.auto_class.from_pretrained(*args, **{"trust_remote_code": False, **kwargs})  # nobody is asked
        patch(model)
        return model

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> PreTrainedModel:
        model = cls.auto_class.from_config(*args, **kwargs)
        patch(model)
        return model


class AutoModelForCausalLM(_PatchedAuto):
    """Load with the arguments of `transformers.AutoModelForCausalLM`, then patch."""

    auto_class = transformers.AutoModelForCausalLM


class AutoModelForImageTextToText(_PatchedAuto):
    """Load with the arguments of `transformers.AutoModelForImageTextToText`, then patch."""

    auto_class = transformers.AutoModelForImageTextToText
