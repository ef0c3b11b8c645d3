"""transformers' auto classes of language models; the models they return run our kernels.

keep_logits: as in `patch`.
"""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PreTrainedModel

from ligertune.patching.experts.kernel_experts import register_experts
from ligertune.patching.patch import check_switches, patch


class _PatchedAuto:
    auto_class: type[Any]  # a class of transformers' auto classes, which have no public base

    @classmethod
    def from_pretrained(cls, *args: Any, keep_logits: bool = False, **kwargs: Any) -> PreTrainedModel:
        check_switches(cls.__name__, {"keep_logits": keep_logits})
        register_experts()
        kwargs.setdefault("trust_remote_code", False)  # transformers would ask on the terminal
        model = cls.auto_class.from_pretrained(*args, **kwargs)
        patch(model, keep_logits=keep_logits)
        return model

    @classmethod
    def from_config(cls, *args: Any, keep_logits: bool = False, **kwargs: Any) -> PreTrainedModel:
        check_switches(cls.__name__, {"keep_logits": keep_logits})
        register_experts()
        model = cls.auto_class.from_config(*args, **kwargs)
        patch(model, keep_logits=keep_logits)
        return model


class AutoModelForCausalLM(_PatchedAuto):
    """Load with the arguments of `transformers.AutoModelForCausalLM`, then patch."""

    auto_class = transformers.AutoModelForCausalLM


class AutoModelForImageTextToText(_PatchedAuto):
    """Load with the arguments of `transformers.AutoModelForImageTextToText`, then patch."""

    auto_class = transformers.AutoModelForImageTextToText


class AutoModelForSequenceClassification(_PatchedAuto):
    """Load with the arguments of `transformers.AutoModelForSequenceClassification`, then patch."""

    auto_class = transformers.AutoModelForSequenceClassification
