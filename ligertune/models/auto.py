"""transformers' AutoModelForCausalLM and AutoModelForImageTextToText, with our kernels in what they return."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PreTrainedModel

from ligertune.patching.patch import patch


class _Patching:
    theirs: type

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> PreTrainedModel:
        model = cls.theirs.from_pretrained(*args, **kwargs)
        patch(model)
        return model

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> PreTrainedModel:
        model = cls.theirs.from_config(*args, **kwargs)
        patch(model)
        return model


class AutoModelForCausalLM(_Patching):
    """Loads as `transformers.AutoModelForCausalLM` does, with the same arguments, and patches."""

    theirs = transformers.AutoModelForCausalLM


class AutoModelForImageTextToText(_Patching):
    """Loads as `transformers.AutoModelForImageTextToText` does, with the same arguments, and patches."""

    theirs = transformers.AutoModelForImageTextToText
