"""What a side does to the model once it is built and our kernels are in it or not. Runs in the trial's own process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def compile_layers(model: PreTrainedModel) -> None:
    """What train.torch_compile does, without our kernels, and for batches of any length."""
    from ligertune.models.compile import compile_layers

    compile_layers(model, dynamic=None)


def chunk_loss(model: PreTrainedModel) -> None:
    """Hugging Face's model with its logits made, used and forgotten a chunk of rows at a time, in plain torch."""
    from ligertune.patching.chunked_loss import chunk_loss

    chunk_loss(model)


def apply_liger(model: PreTrainedModel) -> None:
    """liger-kernel's own choice for this model, by its public function."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model)


CHANGES: dict[str, Callable[[PreTrainedModel], None]] = {
    "compile": compile_layers,
    "hf-chunked": chunk_loss,
    "liger": apply_liger,
}
