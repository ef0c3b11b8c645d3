"""Formats of quantised checkpoints: which train, how, and what to use in place of the others.

A format is recognised by `quantization_config` of config.json alone. GPTQ, AWQ, HQQ and compressed-tensors stay packed
in memory (`packed_linear.py`) and need no package: their layouts are published. bitsandbytes' checkpoints train as
QLoRA and 8-bit LoRA do, by bitsandbytes and our 4-bit kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedConfig

# packed: LoRA on `PackedLinear`. bitsandbytes: as method.type: qlora or load_in_8bit. loader: by transformers, in a
# form that other modules decide on. refused: nothing trains.
Training = Literal["packed", "bitsandbytes", "loader", "refused"]
ONE_OF_THESE = "Give the checkpoint in 16 bits, or one of GPTQ, AWQ, HQQ, compressed-tensors or bitsandbytes."


@dataclass(frozen=True)
class BaseFormat:
    """A format of quantised checkpoints.

    marker: tensors of which each layer has one. why: it cannot train. instead: what to give in its place.
    """

    title: str
    training: Training
    marker: tuple[str, ...] = ()
    why: str = ""
    instead: str = ONE_OF_THESE


def _refused(title: str, why: str, instead: str = ONE_OF_THESE) -> BaseFormat:
    return BaseFormat(title, "refused", why=why, instead=instead)


NOT_READ = "ligertune does not read its layout"
INFERENCE_ONLY = "transformers reads it for inference only"

# quant_method of config.json -> format. A test compares the keys with transformers' own list, and those that are for
# inference only with its quantizers.
FORMATS: dict[str, BaseFormat] = {
    "gptq": BaseFormat("GPTQ", "packed", marker=("qweight",)),
    "awq": BaseFormat("AWQ", "packed", marker=("qweight",)),
    "hqq": BaseFormat("HQQ", "packed", marker=("W_q",)),
    "compressed-tensors": BaseFormat("compressed-tensors", "packed", marker=("weight_packed", "weight_scale")),
    "bitsandbytes_4bit": BaseFormat("bitsandbytes (4 bits)", "bitsandbytes"),
    "bitsandbytes_8bit": BaseFormat("bitsandbytes (8 bits)", "bitsandbytes"),
    "fp8": BaseFormat("float8 in blocks", "loader"),
    "mxfp4": BaseFormat("MXFP4", "loader"),
    "mxfp8": _refused("MXFP8", NOT_READ),
    "aqlm": _refused("AQLM", NOT_READ),
    "eetq": _refused("EETQ", NOT_READ),
    "sinq": _refused("SINQ", NOT_READ),
    "fp_quant": _refused("FP-Quant", NOT_READ),
    "fouroversix": _refused("Four over Six", NOT_READ),
    "torchao": _refused("torchao", NOT_READ),
    "quanto": _refused("Quanto", NOT_READ),
    "bitnet": _refused("BitNet", NOT_READ, "Give the bfloat16 weights that are published next to it."),
    "auto-round": _refused("AutoRound", INFERENCE_ONLY, "Export it with AutoRound as auto_gptq or auto_awq."),
    "gguf": _refused("GGUF", INFERENCE_ONLY, "Give the checkpoint that it was made from."),
    "fbgemm_fp8": _refused("FBGEMM's float8", INFERENCE_ONLY),
    "gemma": _refused("Gemma's own layout", INFERENCE_ONLY),
    "higgs": _refused("HIGGS", INFERENCE_ONLY),
    "metal": _refused("Metal", INFERENCE_ONLY),
    "nvfp4": _refused("NVFP4", INFERENCE_ONLY),
    "quark": _refused("Quark", INFERENCE_ONLY),
    "spqr": _refused("SpQR", INFERENCE_ONLY),
    "vptq": _refused("VPTQ", INFERENCE_ONLY),
}


def quantization_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """Return quantization_config of a model as a dict; empty if its checkpoint is not quantised."""
    found = getattr(config, "quantization_config", None) or {}
    older = getattr(config, "compression_config", None)  # of compressed-tensors before 0.8
    if older and not found:
        return {**older, "quant_method": "compressed-tensors"}
    if not isinstance(found, Mapping):
        return {"quant_method": found} if isinstance(found, str) else found.to_dict()
    return dict(found)


def quant_method_of(settings: Mapping[str, Any]) -> str:
    """Return the quant_method of a configuration by transformers' names, which tell bitsandbytes' bits apart."""
    method = settings.get("quant_method")
    name = str(getattr(method, "value", method))
    if settings.get("load_in_4bit") or settings.get("load_in_8bit") or name == "bitsandbytes":
        return "bitsandbytes_8bit" if settings.get("load_in_8bit") else "bitsandbytes_4bit"
    return name


def format_of(config: PreTrainedConfig) -> BaseFormat | None:
    """Return the format of a model's checkpoint; None if it is not quantised. An unknown one is refused."""
    settings = quantization_settings(config)
    if not settings or _holds_dense_weights(settings):
        return None
    name = quant_method_of(settings)
    return FORMATS.get(name) or _refused(name, NOT_READ)


def _holds_dense_weights(settings: Mapping[str, Any]) -> bool:
    """Return whether the weights are stored as they are, only rounded: compressed-tensors before compression."""
    return quant_method_of(settings) == "compressed-tensors" and settings.get("format") in ("dense", "fakequant")


def is_packed(config: PreTrainedConfig) -> bool:
    """Return whether the linear layers of a checkpoint become `PackedLinear`s."""
    found = format_of(config)
    return found is not None and found.training == "packed"


@dataclass(frozen=True)
class PackedLayout:
    """How the layers of a packed checkpoint are stored, from its quantization_config.

    bits, group_size: for an estimate before the files are here; a layer's own are read from its tensors. other_bits:
    that some layers have in place of `bits`.
    """

    method: str
    bits: int = 4
    group_size: int = 0
    stored_minus_one: bool = True  # GPTQ's zero points
    axis: int = 1  # HQQ
    other_bits: tuple[int, ...] = ()

    @property
    def format(self) -> BaseFormat:
        return FORMATS[self.method]


def layout_of(config: PreTrainedConfig) -> PackedLayout:
    """Return the layout of a packed checkpoint. Raises ValueError with the reason for one that is not read."""
    settings = quantization_settings(config)
    method = quant_method_of(settings)
    if method == "gptq":
        return _gptq_layout(settings)
    if method == "awq":
        return _awq_layout(settings)
    if method == "hqq":
        return _hqq_layout(settings)
    return _compressed_layout(settings)


def _gptq_layout(settings: Mapping[str, Any]) -> PackedLayout:
    stored = settings.get("checkpoint_format", "gptq")
    if stored not in ("gptq", "gptq_v2"):
        raise ValueError(f"its checkpoint_format is {stored}, and gptq and gptq_v2 are read")
    bits = _bits(settings.get("bits", 4), BITS["gptq"])
    by_layer = (one for one in (settings.get("dynamic") or {}).values() if one and "bits" in one)  # GPTQModel's
    others = tuple(_bits(one["bits"], BITS["gptq"]) for one in by_layer)
    group_size = int(settings.get("group_size") or 0)
    return PackedLayout("gptq", bits, group_size, stored_minus_one=stored == "gptq", other_bits=others)


def _awq_layout(settings: Mapping[str, Any]) -> PackedLayout:
    stored = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if stored != "gemm":
        raise ValueError(f"its version is {stored}, and gemm is read")
    bits = _bits(settings.get("bits") or settings.get("w_bit") or 4, BITS["awq"])
    return PackedLayout("awq", bits, int(settings.get("group_size") or settings.get("q_group_size") or 0))


def _hqq_layout(settings: Mapping[str, Any]) -> PackedLayout:
    given = settings.get("quant_config") or {}
    weights = given.get("weight_quant_params")
    if not isinstance(weights, Mapping):
        raise ValueError("its quant_config differs between layers, and one for all is read")
    if given.get("scale_quant_params") or given.get("zero_quant_params") or weights.get("view_as_float"):
        raise ValueError("its scales or zero points are quantised or its bytes viewed as floats, which is not read")
    bits = _bits(weights.get("nbits", 4), BITS["hqq"])
    return PackedLayout("hqq", bits, int(weights.get("group_size") or 0), axis=int(weights.get("axis", 1)))


# of the weights of a layer
BITS = {"gptq": (2, 4, 8), "awq": (4,), "hqq": (1, 2, 4, 8), "compressed-tensors": (2, 4, 8)}
_COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


def _compressed_layout(settings: Mapping[str, Any]) -> PackedLayout:
    if (settings.get("transform_config") or {}).get("config_groups"):
        raise ValueError("it rotates activations (transform_config), which is not computed here")
    found: list[tuple[int, int]] = []  # bits and size of the groups of each kind of layer
    for group in (settings.get("config_groups") or {}).values():
        stored = group.get("format") or settings.get("format")
        if stored not in _COMPRESSED:
            raise ValueError(f"its format is {stored}, and {', '.join(_COMPRESSED)} are read")
        weights = group.get("weights") or {}
        known = BITS["compressed-tensors"] if stored == "pack-quantized" else (8,)
        found.append((_bits(weights.get("num_bits", 8), known), int(weights.get("group_size") or 0)))
    if not found:
        return PackedLayout("compressed-tensors")
    (bits, group_size), *others = found
    return PackedLayout("compressed-tensors", bits, group_size, other_bits=tuple(other for other, _ in others))


def _bits(given: Any, known: tuple[int, ...]) -> int:
    bits = int(given) if isinstance(given, str) and given.isdigit() else given
    if bits not in known:
        raise ValueError(f"its weights have {given} bits, and {listed(known)} are read")
    return int(bits)


def listed(numbers: tuple[int, ...]) -> str:
    """Return numbers as in a sentence: 2, 4 and 8."""
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}" if first else last
