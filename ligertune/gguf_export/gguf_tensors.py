"""Tensors of a GGUF file: names, types and values, read one at a time from the safetensors files of a model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open

from ligertune.errors import UserError, plural
from ligertune.files.model_files import shapes_in, weight_files
from ligertune.gguf_export.gguf_families import INSTEAD, GgufFamily, rotary_factors
from ligertune.models.save import SAVED_MODEL

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

READABLE = ("F32", "F16", "BF16")
# kind of --gguf -> (type of matrices, file type): names of gguf.GGMLQuantizationType and gguf.LlamaFileType
KINDS = {
    "f32": ("F32", "ALL_F32"),
    "f16": ("F16", "MOSTLY_F16"),
    "bf16": ("BF16", "MOSTLY_BF16"),
    "q8_0": ("Q8_0", "MOSTLY_Q8_0"),
}
ROTARY_FACTORS = "rope_freqs.weight"
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$")  # buffers that models compute themselves
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file. kind: of gguf.GGMLQuantizationType. heads: permute the rows of so many heads; 0: none."""

    source: str  # its name in the safetensors file; empty for the rotary factors
    path: Path
    name: str
    shape: tuple[int, ...]
    kind: str
    heads: int = 0
    offset: float = 0.0

    @property
    def n_bytes(self) -> int:
        import gguf

        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.kind]]
        return math.prod(self.shape) // block * size


@dataclass(frozen=True)
class GgufTensors:
    """The tensors in the order of the file, and notes on what is left out or stored in another type."""

    tensors: tuple[GgufTensor, ...]
    notes: tuple[str, ...]


def plan_tensors(folder: Path, config: PreTrainedConfig, family: GgufFamily, kind: str) -> GgufTensors:
    """Return the tensors to write for a model folder, without reading them. Raises UserError for missing ones."""
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.architecture], config.num_hidden_layers)
    found: list[GgufTensor] = []
    left_out: list[str] = []
    for path, source, shape in _stored(folder, config):
        layer = _LAYER.match(source)
        name = names.get_name(source, (".weight", ".bias"))
        if _COMPUTED.search(source) or (source == "lm_head.weight" and config.tie_word_embeddings):
            continue
        if name is None or (layer is not None and int(layer[1]) >= config.num_hidden_layers):
            left_out.append(source)
            continue
        heads = 0
        if family.permutes_heads and ".q_proj." in source:
            heads = config.num_attention_heads
        elif family.permutes_heads and ".k_proj." in source:
            heads = config.num_key_value_heads
        is_norm = name.endswith("norm.weight")
        found.append(
            GgufTensor(source, path, name, shape, _kind_of(shape, kind), heads, family.norm_offset if is_norm else 0.0)
        )
    _check_complete(found, left_out, config)
    factors = rotary_factors(config)
    if factors is not None:
        found.insert(0, GgufTensor("", folder, ROTARY_FACTORS, tuple(factors.shape), "F32"))
    return GgufTensors(tuple(found), tuple(_notes(found, left_out, kind)))


def _stored(folder: Path, config: PreTrainedConfig) -> Iterator[tuple[Path, str, tuple[int, ...]]]:
    """Yield (file, name, shape) of each tensor of a folder. Raises UserError for files and dtypes that are not read."""
    for path in weight_files(folder, SAVED_MODEL, explicit=getattr(config, "transformers_weights", None)):
        if path.suffix != ".safetensors":
            raise UserError(
                f"--gguf: {path} is no safetensors file.", hint="Write the model anew with --dtype bfloat16."
            )
        shapes = shapes_in(path, SAVED_MODEL)
        with safe_open(path, framework="pt") as file:
            kinds = {name: file.get_slice(name).get_dtype() for name in shapes}
        for name, shape in shapes.items():
            if kinds[name] not in READABLE:
                raise UserError(
                    f"--gguf: {name} is stored as {kinds[name]}.",
                    hint="Write dense weights with --dtype bfloat16, in the same command.",
                )
            yield path, name, shape


def _kind_of(shape: tuple[int, ...], kind: str) -> str:
    """Return the type of a tensor: float32 for vectors; float16 for rows that the blocks of q8_0 do not divide."""
    import gguf

    wanted = KINDS[kind][0]
    if len(shape) == 1:
        return "F32"
    block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[wanted]][0]
    return wanted if shape[-1] % block == 0 else "F16"


def _check_complete(found: list[GgufTensor], left_out: list[str], config: PreTrainedConfig) -> None:
    """Raise UserError if a layer has a tensor without a name in GGUF, or fewer tensors than the others."""
    own = [name for name in left_out if _is_of_the_model(name, config)]
    if own:
        raise UserError(f"--gguf: {own[0]} has no place in a GGUF file of this architecture.", hint=INSTEAD)
    names = {tensor.name for tensor in found}
    parts = {tensor.name.split(".", 2)[2] for tensor in found if tensor.name.startswith("blk.")}
    wanted = {f"blk.{layer}.{part}" for layer in range(config.num_hidden_layers) for part in parts}
    wanted |= {"token_embd.weight", "output_norm.weight"}
    if not config.tie_word_embeddings:
        wanted.add("output.weight")
    missing = sorted(wanted - names)
    if missing:
        raise SAVED_MODEL.error(f"the weight files lack {plural(len(missing), 'tensor')}, such as {missing[0]}.")


def _is_of_the_model(name: str, config: PreTrainedConfig) -> bool:
    layer = _LAYER.match(name)
    return layer is not None and int(layer[1]) < config.num_hidden_layers


def _notes(found: list[GgufTensor], left_out: list[str], kind: str) -> Iterator[str]:
    if left_out:
        yield f"{plural(len(left_out), 'tensor')} that GGUF has no place for are left out: {', '.join(left_out[:3])}."
    other = [tensor for tensor in found if len(tensor.shape) > 1 and tensor.kind != KINDS[kind][0]]
    if other:
        yield f"{plural(len(other), 'matrix', 'matrices')} with rows of no multiple of 32 are stored as float16."


def read_tensor(tensor: GgufTensor, config: PreTrainedConfig) -> np.ndarray[Any, Any]:
    """Return a tensor's values in the type of the file; of packed types the bytes. Raises UserError."""
    import gguf

    if tensor.source:
        with safe_open(tensor.path, framework="pt") as file:
            values = file.get_tensor(tensor.source).float()
    else:
        factors = rotary_factors(config)
        assert factors is not None
        values = factors
    if tensor.heads:
        values = _permuted(values, tensor.heads)
    array = (values + tensor.offset).numpy()
    if not np.isfinite(array).all():
        raise UserError(f"--gguf: {tensor.source} holds NaN or infinity.", exit_code=1)
    if tensor.kind == "F16" and np.abs(array).max(initial=0.0) > 65504:
        raise UserError(
            f"--gguf: {tensor.source} has numbers above 65,504, the largest of float16.", hint="Write --gguf bf16."
        )
    return gguf.quants.quantize(np.ascontiguousarray(array), gguf.GGMLQuantizationType[tensor.kind])


def _permuted(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows (H * D, ...), of each head in the order 0, D/2, 1, D/2 + 1, ...: rotary pairs become neighbours."""
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return halves.transpose(1, 2).reshape(values.shape)
