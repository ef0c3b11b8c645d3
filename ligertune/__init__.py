"""ligertune: fine-tune language models with fused Triton kernels.

    import ligertune
    model = ligertune.AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B")   # load and patch
    report = ligertune.patch(my_model)                                          # or patch a loaded model
    report = ligertune.train("recipe.yaml")                                     # or train as the command does

Names are imported on first use, so `import ligertune` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what editors and type checkers see; tests/test_public_api.py compares it with the table below
    from ligertune.errors import UserError as UserError
    from ligertune.features.task import Measures as Measures
    from ligertune.features.task import Task as Task
    from ligertune.patching.deferred_logits import loss_counts as loss_counts
    from ligertune.patching.experts.kernel_experts import register_experts as register_experts
    from ligertune.patching.patch import AutoModelForCausalLM as AutoModelForCausalLM
    from ligertune.patching.patch import AutoModelForImageTextToText as AutoModelForImageTextToText
    from ligertune.patching.patch import AutoModelForSequenceClassification as AutoModelForSequenceClassification
    from ligertune.patching.patch import patch as patch
    from ligertune.patching.patch import unpatch as unpatch
    from ligertune.recipe.read import load_recipe as load_recipe
    from ligertune.trainer import Trainer as Trainer
    from ligertune.trainer import plan as plan
    from ligertune.trainer import train as train

__version__ = "0.1.0"

_WHERE = {
    "patch": "ligertune.patching.patch",
    "unpatch": "ligertune.patching.patch",
    "register_experts": "ligertune.patching.experts.kernel_experts",
    "loss_counts": "ligertune.patching.deferred_logits",
    "AutoModelForCausalLM": "ligertune.patching.patch",
    "AutoModelForImageTextToText": "ligertune.patching.patch",
    "AutoModelForSequenceClassification": "ligertune.patching.patch",
    "load_recipe": "ligertune.recipe.read",
    "UserError": "ligertune.errors",
    "Trainer": "ligertune.trainer",
    "plan": "ligertune.trainer",
    "train": "ligertune.trainer",
    "Task": "ligertune.features.task",
    "Measures": "ligertune.features.task",
}

__all__ = ["__version__", *_WHERE]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'ligertune' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
