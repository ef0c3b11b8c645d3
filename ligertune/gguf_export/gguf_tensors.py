"""Tensors of a GGUF file: names, types and values, read one at a time from the safetensors files of a model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open

from ligertune.errors import UserError, plural
from ligertune.files.model_files import shapes_in, weight_files
from ligertune.gguf_export.gguf_families import INSTEAD, GgufFamily, head_dim_of, n_experts, rotary_factors
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
# of one expert: (before its number, number, after it), which name all experts of a layer without it
_EXPERT = re.compile(r"(model\.layers\.\d+\.\w+\.experts)\.(\d+)(\.\w+\.weight)$")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of a safetensors file."""

    path: Path
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file. kind: of gguf.GGMLQuantizationType. heads: permute the rows of so many heads; 0: none.

    sources: the stored tensor, or those of the experts of a layer; none for the rotary factors.
    """

    sources: tuple[SourceTensor, ...]
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
    named, left_out = _named(folder, config, family)
    found = [_tensor(name, stored, config, family, kind) for name, stored in named.items()]
    _check_complete(found, left_out, config)
    factors = rotary_factors(config)
    if factors is not None:
        found.insert(0, GgufTensor((), ROTARY_FACTORS, tuple(factors.shape), "F32"))
    return GgufTensors(tuple(found), tuple(_notes(found, left_out, kind)))


def _named(
    folder: Path, config: PreTrainedConfig, family: GgufFamily
) -> tuple[dict[str, list[SourceTensor]], list[str]]:
    """Return {name in the file: stored tensors, of experts in their order}, and the names without a place there."""
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.architecture], config.num_hidden_layers)
    found: dict[str, list[tuple[int, SourceTensor]]] = {}
    left_out: list[str] = []
    for stored in _stored(folder, config):
        if _COMPUTED.search(stored.name) or (stored.name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        expert = _EXPERT.match(stored.name)
        name = names.get_name("".join(expert.group(1, 3)) if expert else stored.name, (".weight", ".bias"))
        if name is None or _is_behind(stored.name, config) or (name.endswith(".bias") and not family.has_biases):
            left_out.append(stored.name)
        else:
            found.setdefault(name, []).append((int(expert[2]) if expert else 0, stored))
    in_order = {name: [stored for _, stored in sorted(one, key=itemgetter(0))] for name, one in found.items()}
    return in_order, left_out


def _tensor(
    name: str, stored: list[SourceTensor], config: PreTrainedConfig, family: GgufFamily, kind: str
) -> GgufTensor:
    heads = 0
    if family.permutes_heads and name.split(".")[2:3] == ["attn_q"]:
        heads = config.num_attention_heads
    elif family.permutes_heads and name.split(".")[2:3] == ["attn_k"]:
        heads = config.num_key_value_heads
    shape = stored[0].shape
    if name == "token_embd.weight" or heads:
        rows = heads * head_dim_of(config) if heads else config.vocab_size
        if shape[0] != rows:
            raise SAVED_MODEL.error(f"{stored[0].name} has {shape[0]} rows, and config.json says {rows}.")
    if "_exps." in name:
        if len(stored) != n_experts(config) or any(one.shape != shape for one in stored):
            raise SAVED_MODEL.error(
                f"{stored[0].name}: the layer does not have {n_experts(config)} experts of one size."
            )
        shape = (len(stored), *shape)
    offset = family.norm_offset if name.endswith("norm.weight") else 0.0
    return GgufTensor(tuple(stored), name, shape, _kind_of(name, shape, kind), heads, offset)


def _stored(folder: Path, config: PreTrainedConfig) -> Iterator[SourceTensor]:
    """Yield each tensor of a folder. Raises UserError for files and dtypes that are not read."""
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
            yield SourceTensor(path, name, shape)


def _kind_of(name: str, shape: tuple[int, ...], kind: str) -> str:
    """Return the type of a tensor: float32 for vectors and routers; float16 where blocks of q8_0 do not divide rows."""
    import gguf

    wanted = KINDS[kind][0]
    if len(shape) == 1 or name.endswith("ffn_gate_inp.weight"):
        return "F32"
    block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[wanted]][0]
    return wanted if shape[-1] % block == 0 else "F16"


def _check_complete(found: list[GgufTensor], left_out: list[str], config: PreTrainedConfig) -> None:
    """Raise UserError if a layer has a tensor without a name in GGUF, or fewer tensors than the others."""
    own = [name for name in left_out if _LAYER.match(name) and not _is_behind(name, config)]
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


def _is_behind(name: str, config: PreTrainedConfig) -> bool:
    """Return whether a tensor belongs to a layer behind the last one, such as one for several tokens."""
    layer = _LAYER.match(name)
    return layer is not None and int(layer[1]) >= config.num_hidden_layers


def _notes(found: list[GgufTensor], left_out: list[str], kind: str) -> Iterator[str]:
    if left_out:
        yield f"{plural(len(left_out), 'tensor')} that GGUF has no place for are left out: {', '.join(left_out[:3])}."
    other = [tensor for tensor in found if tensor.kind == "F16" and kind != "f16"]
    if other:
        yield f"{plural(len(other), 'matrix', 'matrices')} with rows of no multiple of 32 are stored as float16."


def read_tensor(tensor: GgufTensor, config: PreTrainedConfig) -> np.ndarray[Any, Any]:
    """Return a tensor's values in the type of the file; of packed types the bytes. Raises UserError."""
    import gguf

    if tensor.sources:
        read = [_read(stored) for stored in tensor.sources]
        values = read[0] if len(tensor.shape) == len(tensor.sources[0].shape) else torch.stack(read)
    else:
        factors = rotary_factors(config)
        assert factors is not None
        values = factors
    if tensor.heads:
        values = _permuted(values, tensor.heads)
    array = (values + tensor.offset).numpy()
    if not np.isfinite(array).all():
        raise UserError(f"--gguf: {tensor.sources[0].name} holds NaN or infinity.", exit_code=1)
    if tensor.kind == "F16" and np.abs(array).max(initial=0.0) > 65504:
        raise UserError(
            f"--gguf: {tensor.sources[0].name} has numbers above 65,504, the largest of float16.",
            hint="Write --gguf bf16.",
        )
    return gguf.quants.quantize(np.ascontiguousarray(array), gguf.GGMLQuantizationType[tensor.kind])


def _read(stored: SourceTensor) -> torch.Tensor:
    with safe_open(stored.path, framework="pt") as file:
        values: torch.Tensor = file.get_tensor(stored.name)
    return values.float()


def _permuted(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows (H * D, ...), of each head in the order 0, D/2, 1, D/2 + 1, ...: rotary pairs become neighbours."""
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return halves.transpose(1, 2).reshape(values.shape)
