"""From a recipe and a built model to the model with its heads, untrained or from a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ligertune.errors import UserError
from ligertune.tasks.medusa.head_form import HeadForm, check_plain_head, head_form
from ligertune.tasks.medusa.heads import MedusaHeads
from ligertune.tasks.medusa.heads_files import HeadsConfig, check_heads_fit, read_heads
from ligertune.tasks.medusa.medusa_model import MedusaModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ligertune.planning.options import MedusaOptions


def attach_heads(base_model: PreTrainedModel, spec: MedusaOptions, *, fused: bool) -> MedusaModel:
    """`base_model` with heads: those of `heads_path`, or new ones, which are its own next-token predictor at first.

    A UserError where it has no plain head, or the heads are another model's. Of a model on the meta device, and then of
    heads in a folder, only sizes are looked at.
    """
    weight = check_plain_head(base_model).weight.detach()
    on_meta = weight.device.type == "meta"
    if spec.heads_path is not None:
        check_heads_as_said(spec, Path(spec.heads_path))
        check_heads_fit(HeadsConfig.read(Path(spec.heads_path)), Path(spec.heads_path), weight)
    if spec.heads_path is None or on_meta:
        heads = MedusaHeads(spec.num_heads, spec.num_layers, weight, own_lm_head=spec.lm_head == "own")
    else:
        heads = read_heads(Path(spec.heads_path), weight)
    form = HeadForm() if on_meta else head_form(base_model)
    return MedusaModel(base_model, heads, spec, form=form, fused=fused)


def check_heads_as_said(spec: MedusaOptions, folder: Path) -> None:
    """A UserError where the recipe says other heads than the folder that they come from holds."""
    found = HeadsConfig.read(folder)
    said = {"num_heads": spec.num_heads, "num_layers": spec.num_layers, "lm_head": spec.lm_head}
    held = {
        "num_heads": found.medusa_num_heads,
        "num_layers": found.medusa_num_layers,
        "lm_head": "shared" if found.original_lm_head else "own",
    }
    for key, value in said.items():
        if value != held[key]:
            raise UserError(
                f"medusa.{key}: {value}, but the heads in {folder} were trained with {held[key]}.",
                hint=f"Write medusa.{key}: {held[key]}, or name other heads in medusa.heads_path.",
            )
