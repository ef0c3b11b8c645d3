"""Files of trained Medusa heads: `medusa_lm_head.safetensors` and `config.json`, as TGI and vLLM <= 0.32 read them.

    {i}.{j}.linear.weight, {i}.{j}.linear.bias    block j of head i
    lm_heads.0.weight                             shared projection: the model's output head, which vLLM requires
    {i}.{L}.weight                                instead one projection per head: its own, or a copy (`expand`), as
                                                  TensorRT-LLM and the first Medusa release read them

config.json has no `architectures`, with which TGI would drop the heads, and sets `medusa_fc_bias`, without which vLLM
drops the biases. The folder also holds the tokenizer, the paths of the candidate tree and the prompt template.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ligertune.decode.speculative.candidate_tree import Path as TreePath
from ligertune.decode.speculative.candidate_tree import chain
from ligertune.errors import UserError
from ligertune.features.medusa.heads import MedusaHeads
from ligertune.features.medusa.recipe import HEADS_FOLDER
from ligertune.files.base_model import TrainedBase
from ligertune.files.checked_files import DamagedFileError, parse_fields, read_json_value
from ligertune.files.model_files import ModelOrigin, read_json
from ligertune.files.storage import new_folder, write_text
from ligertune.models.save import write_prompt
from ligertune.planning.saved_model import trained_base

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

CONFIG, WEIGHTS = HEADS_FOLDER.files
CHOICES = "medusa_choices.json"
# The largest published trees have 64 nodes and ranks up to 9. A tree of N nodes has an N x N mask.
MAX_PATHS = 4096
MAX_SIZE = 2**24  # as in the sizes of a configuration
MAX_RANKS = 1024
SAVED_HEADS = ModelOrigin("Medusa heads", "add --trust-remote-code")


@dataclass(frozen=True)
class HeadsConfig:
    """The fields of config.json that describe the heads."""

    medusa_num_heads: int
    medusa_num_layers: int
    hidden_size: int
    vocab_size: int
    base_model_name_or_path: str
    original_lm_head: bool
    torch_dtype: str
    base_model_fingerprint: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the whole config.json. vLLM renames every key with "num" and "heads" or "layers": add no others."""
        fixed = {
            "model_type": "medusa",
            "truncated_vocab_size": self.vocab_size,
            "medusa_fc_bias": True,
            "version": "2" if self.original_lm_head else "1",
        }
        return {**dataclasses.asdict(self), **fixed}

    @staticmethod
    def read(folder: Path) -> HeadsConfig:
        """Read config.json. Raises UserError if the folder holds no heads, or lacks a required field."""
        path = folder / CONFIG
        if not (folder / WEIGHTS).is_file() or not path.is_file():
            raise UserError(
                f"{folder} holds no Medusa heads ({CONFIG} and {WEIGHTS}).",
                hint="Name the folder medusa/ that `ligertune medusa` left in its output_dir.",
            )
        found = read_json(path, SAVED_HEADS)
        missing = [f.name for f in dataclasses.fields(HeadsConfig)[:5] if found.get(f.name) is None]
        if missing:
            raise UserError(
                f"{path} lacks {', '.join(missing)}.",
                hint="It must describe Medusa heads, not a whole model; the heads of a run are in its folder medusa/.",
            )
        defaults = {"original_lm_head": found.get("version") == "2", "torch_dtype": "float32"}
        for name in ("medusa_num_heads", "medusa_num_layers", "hidden_size", "vocab_size"):
            if type(found[name]) is not int or not 1 <= found[name] <= MAX_SIZE:
                raise SAVED_HEADS.error(f"{path}: {name} must be a whole number above 0.")
        given = {name: value for name, value in found.items() if value is not None}
        try:
            return parse_fields(HeadsConfig, {**defaults, **given})
        except DamagedFileError as error:
            raise SAVED_HEADS.error(f"{path} {error}.") from error


def fingerprint_of(weight: Tensor) -> str:
    """Return a hash of an output head (V, E), the same for float32 and bfloat16 copies of it."""
    flat = weight.detach().reshape(-1)
    # a sample, because a whole head on a GPU would be copied to the host
    sample = flat[:: max(1, flat.numel() // 4096)].to("cpu", torch.bfloat16)
    return hashlib.sha256(sample.view(torch.int16).numpy().tobytes()).hexdigest()[:16]


def check_heads_fit(config: HeadsConfig, folder: Path, weight: Tensor) -> None:
    """Raise UserError if the heads were trained for an output head of another size or with other weights."""
    sizes = (config.vocab_size, config.hidden_size)
    if sizes != tuple(weight.shape):
        raise UserError(
            f"{folder}: these heads were trained for a model of hidden size {sizes[1]} and a vocabulary of {sizes[0]}; "
            f"this one has {weight.shape[1]} and {weight.shape[0]}.",
            hint=f"Use them with {config.base_model_name_or_path}, or train heads for this model.",
        )
    known = config.base_model_fingerprint
    if known is not None and weight.device.type != "meta" and known != fingerprint_of(weight):
        raise UserError(
            f"{folder}: these heads were trained for {config.base_model_name_or_path}, and this is another model "
            "(its output head has other weights).",
            hint="Use them with that model, or train heads for this one.",
        )


@dataclass(frozen=True)
class ServedModel:
    """The model that heads are served with. name: its folder or hub id.

    prompt: of training, as `models.save.prompt_of` returns it. base: the model as it was while the heads were trained.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    prompt: Mapping[str, Any]
    base: TrainedBase | None = None


def write_heads(
    heads: dict[str, Tensor],
    weight: Tensor,
    folder: Path,
    model: ServedModel,
    *,
    paths: Sequence[TreePath],
    expand: bool,
) -> None:
    """Write heads, tokenizer, tree and prompt template; `folder` appears only when complete.

    heads: state dict of `MedusaHeads`. weight (V, E): of the model's output head. expand: write a copy of a shared
    projection for each head.
    """
    num_heads, num_layers = _heads_and_blocks(heads)
    shared = f"0.{num_layers}.weight" not in heads
    weight = weight.detach().to("cpu").contiguous()
    config = HeadsConfig(
        medusa_num_heads=num_heads,
        medusa_num_layers=num_layers,
        hidden_size=weight.shape[1],
        vocab_size=weight.shape[0],
        base_model_name_or_path=model.name,
        original_lm_head=shared and not expand,
        torch_dtype=str(weight.dtype).removeprefix("torch."),
        base_model_fingerprint=fingerprint_of(weight),
    )
    tensors = {name: t.detach().to("cpu").contiguous() for name, t in heads.items()}
    if shared:
        names = [f"{i}.{num_layers}.weight" for i in range(num_heads)] if expand else ["lm_heads.0.weight"]
        tensors |= {name: weight.clone() for name in names}
    with new_folder(folder) as aside:
        save_file(tensors, aside / WEIGHTS, metadata={"format": "pt"})
        model.tokenizer.save_pretrained(aside)
        write_text(aside / CONFIG, json.dumps(config.as_dict(), indent=1) + "\n")
        write_choices(aside, paths)
        write_prompt(aside, model.prompt, model.base)


def _heads_and_blocks(tensors: dict[str, Tensor]) -> tuple[int, int]:
    """Return the number of heads and of the residual blocks of each, from the names of their weights."""
    blocks = [name.split(".") for name in tensors if ".linear." in name]
    return len({block[0] for block in blocks}), len({block[1] for block in blocks})


def write_choices(folder: Path, paths: Sequence[TreePath]) -> None:
    """Write the paths of the candidate tree, as lists of ranks."""
    write_text(folder / CHOICES, json.dumps([list(path) for path in paths]) + "\n")


def read_choices(folder: Path, num_heads: int) -> list[TreePath]:
    """Read the paths of the candidate tree; without the file the tree is a chain."""
    path = folder / CHOICES
    if not path.is_file():
        return chain(num_heads)
    try:
        paths = read_json_value(path)
    except OSError as error:
        raise SAVED_HEADS.error(f"{path} cannot be read: {error.strerror}.") from error
    except DamagedFileError as error:
        raise SAVED_HEADS.error(f"{path} must hold lists of ranks, and {error}.") from error
    ranks = min(MAX_RANKS, HeadsConfig.read(folder).vocab_size)
    if not isinstance(paths, list) or not all(_is_path(one, num_heads, ranks) for one in paths):
        raise SAVED_HEADS.error(
            f"{path} must hold lists of ranks: 1 to {num_heads} whole numbers from 0 to {ranks - 1} each."
        )
    found = [tuple(one) for one in paths]
    if not 0 < len(found) <= MAX_PATHS or not {one[:-1] for one in found} <= {(), *found}:
        raise SAVED_HEADS.error(f"{path} must hold 1 to {MAX_PATHS} paths, and the beginnings of each.")
    return found


def _is_path(value: Any, num_heads: int, ranks: int) -> bool:
    if not isinstance(value, list) or not 1 <= len(value) <= num_heads:
        return False
    return all(type(rank) is int and 0 <= rank < ranks for rank in value)


def read_heads(folder: Path, weight: Tensor) -> MedusaHeads:
    """Load heads for the output head `weight` (V, E), in its dtype and on its device. Raises UserError."""
    config = HeadsConfig.read(folder)
    check_heads_fit(config, folder, weight)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{folder / WEIGHTS} could not be read: {error}", hint="Train the heads again.") from error
    described = (config.medusa_num_heads, config.medusa_num_layers)
    stored = _heads_and_blocks(tensors)
    if described != stored:  # before they are allocated
        raise UserError(
            f"{folder / WEIGHTS} does not hold {described[0]} heads of {described[1]} blocks, as its {CONFIG} says:"
            f" it holds {stored[0]} of {stored[1]}.",
            hint="Train or export the heads again.",
        )
    own = f"0.{config.medusa_num_layers}.weight" in tensors  # config.json of the first Medusa release does not tell
    heads = MedusaHeads(config.medusa_num_heads, config.medusa_num_layers, weight.detach(), own_lm_head=own)
    try:
        heads.load_state_dict({name: t for name, t in tensors.items() if not name.startswith("lm_heads.")})
    except RuntimeError as error:
        reason = " ".join(str(error).partition("\n")[2].split())
        raise UserError(
            f"{folder / WEIGHTS} does not hold {config.medusa_num_heads} heads of {config.medusa_num_layers} blocks, "
            f"as its {CONFIG} says: {reason}",
            hint="Train or export the heads again.",
        ) from error
    return heads


def base_model_of(folder: Path, config: HeadsConfig) -> str:
    """Return the folder or hub id of the base model. If its folder has moved, look for model/ next to the heads."""
    named = config.base_model_name_or_path
    sibling = folder.resolve().parent / "model"
    if Path(named).is_absolute() and not Path(named).is_dir() and (sibling / CONFIG).is_file():
        return str(sibling)
    return named


def base_of_heads(folder: Path, config: HeadsConfig) -> TrainedBase | None:
    """Return the base model as heads were trained on it; None if the run saved its own model, or is not known."""
    found = trained_base(folder)
    return found if found is not None and found.name == config.base_model_name_or_path else None
