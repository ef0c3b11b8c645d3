"""Commands that serve an exported model in vLLM, SGLang, llama.cpp and Ollama: printed by `export`, and on the card."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ligertune.files.base_model import TrainedBase
from ligertune.files.model_files import ADAPTER_CONFIG
from ligertune.files.storage import read_object

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of --max-lora-rank in vLLM 0.31


@dataclass(frozen=True)
class GgufNames:
    """A GGUF file and the Modelfile next to it."""

    file: str
    modelfile: str


@dataclass(frozen=True)
class ServedFiles:
    """What is served. address: a folder or hub id. name: for requests. reads_images: as well as text.

    adapter, base: of an adapter alone, and its base model as users name it. has_weights: of Hugging Face's format.
    """

    address: str
    name: str
    reads_images: bool = False
    adapter: AdapterFacts | None = None
    base: str = ""
    has_weights: bool = True
    gguf: GgufNames | None = None


@dataclass(frozen=True)
class AdapterFacts:
    """rank: the highest of its layers. dtype: of the base while it was trained. merge_first: why servers refuse it."""

    rank: int
    dtype: str
    merge_first: str


def adapter_facts(folder: Path, base: TrainedBase | None) -> AdapterFacts | None:
    """Return what servers must know of the adapter in a folder; None if it holds none."""
    config = read_object(folder / ADAPTER_CONFIG)
    if config is None:
        return None
    ranks = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
    dtype = "auto" if base is None else base.dtype
    return AdapterFacts(max((rank for rank in ranks if type(rank) is int), default=1), dtype, _reason(config, base))


def _reason(config: dict[str, Any], base: TrainedBase | None) -> str:
    if base is not None and base.stored_as is not None:
        return "it was trained on quantised weights, which servers do not compute"
    if config.get("use_dora"):
        return "servers do not load DoRA"
    if config.get("modules_to_save") or config.get("trainable_token_indices"):
        return "servers do not load whole layers or new rows of an adapter"
    if config.get("target_parameters"):
        return "servers do not load adapters of experts"
    return ""


def server_commands(files: ServedFiles) -> list[tuple[str, str]]:
    """Return (server, command) of each server that loads the files."""
    found = []
    if files.adapter is not None:
        found += _adapter_commands(files, files.adapter)
    elif files.has_weights:
        found += _model_commands(files)
    if files.gguf is not None:
        created = files.name.lower()  # Ollama's names have no capitals
        make = f"ollama create {shlex.quote(created)} -f {shlex.quote(files.gguf.modelfile)}"
        found += [
            ("llama.cpp", f"llama-server -m {shlex.quote(files.gguf.file)} --alias {shlex.quote(files.name)}"),
            ("Ollama", f"{make} && ollama run {shlex.quote(created)}"),
        ]
    return found


def _model_commands(files: ServedFiles) -> list[tuple[str, str]]:
    name = shlex.quote(files.name)
    address = shlex.quote(files.address)
    found = [
        ("vLLM", f"vllm serve {address} --served-model-name {name}"),
        ("SGLang", f"python -m sglang.launch_server --model-path {address} --served-model-name {name}"),
    ]
    if files.gguf is None and not files.reads_images:
        convert = f"python convert_hf_to_gguf.py {address} --outtype bf16 --outfile {name}.gguf"
        found.append(("llama.cpp", f"{convert} && llama-server -m {name}.gguf"))
    return found


def _adapter_commands(files: ServedFiles, adapter: AdapterFacts) -> list[tuple[str, str]]:
    if adapter.merge_first:
        return []
    base = shlex.quote(files.base)
    module = shlex.quote(f"{files.name}={files.address}")
    rank = next((most for most in VLLM_RANKS if most >= adapter.rank), adapter.rank)
    load = f"--enable-lora --max-lora-rank {rank} --lora-modules {module}"
    return [
        ("vLLM", f"vllm serve {base} --dtype {adapter.dtype} {load}"),
        ("SGLang", f"python -m sglang.launch_server --model-path {base} --dtype {adapter.dtype} --lora-paths {module}"),
    ]


def serving_note(files: ServedFiles, prompt_template: str) -> str:
    """Return how requests must be made, or why there is no command; an empty text where nothing is to be said."""
    if files.adapter is not None and files.adapter.merge_first:
        return f"Merge the adapter before you serve it: {files.adapter.merge_first}."
    if prompt_template == "chat" or not files.has_weights:
        return ""
    what = "the prompt of training" if prompt_template == "alpaca" else "the text"
    return f"Send {what} as a completion (/v1/completions): a chat request would use the tokenizer's chat template."
