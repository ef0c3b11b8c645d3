"""`ligertune export --gguf`: write a model as one GGUF file, tensor by tensor, and an Ollama Modelfile next to it.

An adapter or a checkpoint is first exported as a Hugging Face folder; a whole model is read where it is.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial as partial_function
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ligertune.data.templates.bounded_jinja import TemplateRefusalError, render_chat_template, template_name
from ligertune.data.templates.prompt_templates import ALPACA_PROMPT
from ligertune.errors import UserError, format_bytes, message_of, pip_install
from ligertune.files.model_files import ADAPTER_CONFIG, read_json
from ligertune.files.storage import cannot_write, writing
from ligertune.gguf_export.gguf_families import Metadata, gguf_family, hyperparameters
from ligertune.gguf_export.gguf_tensors import KINDS, GgufTensors, plan_tensors, read_tensor
from ligertune.gguf_export.gguf_vocabulary import vocabulary
from ligertune.gguf_export.ollama_modelfile import PLAIN_TEMPLATE, conversation, go_template, modelfile, turn_texts
from ligertune.launcher.signals import before_leaving
from ligertune.models.read_config import read_config
from ligertune.models.save import SAVED_MODEL, read_prompt, read_saved_config, read_saved_tokenizer, saved_spec
from ligertune.planning.preflight import check_out_folder, make_out_folder, write_new
from ligertune.planning.saved_model import saved_options
from ligertune.serving.server_commands import GgufNames
from ligertune.training.checkpoint.export_run import ExportPlan, find_source, plan_export
from ligertune.training.checkpoint.model_card import write_card

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

# The prompt of training under `alpaca`, which the tokenizer's own template does not write.
ALPACA_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ message.content + '\\n\\n' }}"
    "{% elif message.role == 'user' %}{{ "
    + repr(ALPACA_PROMPT).replace("{instruction}", "' + message.content + '")
    + " }}{% else %}{{ message.content + eos_token + '\\n\\n' }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class GgufExport:
    """plan: of the Hugging Face folder that is written first, or read as it is. file: the GGUF file to write."""

    plan: ExportPlan
    file: Path
    kind: str

    def check(self) -> None:
        """Check family and tokenizer before an adapter is merged. Raises UserError."""
        source = self.plan.source
        trust = self.plan.trust_remote_code
        if not source.is_checkpoint:
            is_final = self.plan.how == "in place"
            read_content(Path(source.name), self.kind, "", trust_remote_code=trust, is_final=is_final)
            return
        options = saved_options(source.run) if source.run is not None else None
        if options is not None:  # a checkpoint has no config.json: that of its base model
            config = read_config(options.build.model.model_copy(update={"trust_remote_code": trust}), SAVED_MODEL)
            config.quantization_config = None
            gguf_family(config)

    def write(self) -> WrittenGguf:
        """Write the file from the exported folder, and a Modelfile next to it. Raises UserError."""
        with writing(f"The GGUF file {self.file}", trains=False):
            return write_gguf(self.plan.folder, self.file, self.kind, trust_remote_code=self.plan.trust_remote_code)

    def write_card(self, written: WrittenGguf) -> Path:
        """Write the model card next to the file unless there is one. Raises UserError."""
        folder = self.file.parent
        return write_card(folder, self.plan.source, is_adapter=False, repository=None, gguf=written.names(folder))


def plan_gguf(
    name: str,
    out: Path | None,
    kind: str,
    *,
    checkpoint: str | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
) -> GgufExport:
    """Return how a run, a model, an adapter or a checkpoint becomes a GGUF file. Raises UserError.

    out: the folder of the file, and of the merged model if one is written. kind: f32, f16, bf16 or q8_0. dtype: of the
    merged model, as of `plan_export`.
    """
    check_kind(kind)
    source = find_source(name, checkpoint)
    folder = Path(source.name)
    is_whole = not source.is_checkpoint and not (folder / ADAPTER_CONFIG).is_file()
    if is_whole and dtype is None:
        plan = plan_export(
            name, None, adapter=False, checkpoint=None, in_place=True, trust_remote_code=trust_remote_code
        )
        place = out or (source.run or folder) / "exported"
        check_out_folder(place, "--out", may_hold=None)
    else:
        place = out or (source.run or folder) / "exported"
        _refuse_earlier(place, kind)
        plan = plan_export(
            name, place, adapter=False, checkpoint=checkpoint, trust_remote_code=trust_remote_code, dtype=dtype
        )
    title = _plain((source.run or folder).resolve().name)
    file = place / f"{title}-{kind}.gguf"
    if os.path.lexists(file):
        raise UserError(f"--gguf: {file} exists already.", hint="Remove it, or name another folder with --out.")
    export = GgufExport(plan, file, kind)
    export.check()
    return export


def check_kind(kind: str) -> None:
    """Raise UserError for a type that no library writes, or if the package gguf is missing."""
    if kind.lower().startswith(("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq")):
        raise UserError(
            f"--gguf: no Python package writes {kind}.",
            hint=f"Write --gguf bf16, then run llama.cpp's own: llama-quantize FILE-bf16.gguf FILE-{kind}.gguf {kind}",
        )
    if kind not in KINDS:
        raise UserError(f"--gguf: {kind} is not one of {', '.join(KINDS)}.")
    if find_spec("gguf") is None:
        raise UserError("--gguf needs the package gguf, which is not installed.", hint=f"Run: {pip_install('gguf')}")


def _refuse_earlier(folder: Path, kind: str) -> None:
    """Raise UserError for a folder with a model, which may be that of another checkpoint or of an earlier run."""
    if (folder / "config.json").is_file():
        convert = shlex.join(("ligertune", "export", str(folder), "--out", str(folder), "--gguf", kind))
        raise UserError(
            f"--gguf: {folder} holds a model already.",
            hint=f"Convert that one with `{convert}`, or name a new folder with --out.",
        )


def _plain(name: str) -> str:
    """Return a name without characters that Ollama and shells do not take."""
    return re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII).strip("-.") or "model"


# ---- metadata


@dataclass(frozen=True)
class GgufContent:
    """What a file holds besides its tensors."""

    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    metadata: Metadata
    notes: tuple[str, ...]


def read_content(folder: Path, kind: str, title: str, *, trust_remote_code: bool, is_final: bool = True) -> GgufContent:
    """Return what a file holds besides its tensors. Raises UserError for what llama.cpp cannot compute.

    folder: of the model; with is_final false that of an adapter or a model which is still to be merged or dequantised.
    """
    import gguf

    config = read_saved_config(str(folder), saved_spec(str(folder), trust_remote_code=trust_remote_code))
    tokenizer = read_saved_tokenizer(folder, trust_remote_code=trust_remote_code)
    rows = config.vocab_size
    if not is_final:
        config.quantization_config = None
        rows = max(rows, len(tokenizer))
    family = gguf_family(config)
    after_special = _begins_with_special(folder, tokenizer)
    words = vocabulary(tokenizer, rows, stop_ids_of(folder), after_special=after_special)
    keys = gguf.Keys.General
    metadata: Metadata = {
        keys.TYPE: "model",
        keys.NAME: title,
        keys.FILE_TYPE: int(gguf.LlamaFileType[KINDS[kind][1]]),
        keys.QUANTIZATION_VERSION: gguf.GGML_QUANT_VERSION,
    }
    metadata |= hyperparameters(config, family) | words.metadata
    template = chat_template_of(folder, tokenizer)
    if template:
        metadata[gguf.Keys.Tokenizer.CHAT_TEMPLATE] = template
    notes = list(words.notes)
    if metadata_context(metadata) < config.max_position_embeddings:
        notes.append(
            f"the context is {metadata_context(metadata):,} tokens, the sliding window: llama.cpp has none for this"
            " architecture."
        )
    return GgufContent(config, tokenizer, metadata, tuple(notes))


def metadata_context(metadata: Metadata) -> int:
    """Return the context length of a file's metadata."""
    return next(int(value) for key, value in metadata.items() if key.endswith(".context_length"))  # type: ignore[arg-type]


def stop_ids_of(folder: Path) -> list[int]:
    """Return the ids at which generation stops, of generation_config.json; none without that file."""
    path = folder / "generation_config.json"
    found = read_json(path, SAVED_MODEL).get("eos_token_id") if path.is_file() else None
    ids = found if isinstance(found, list) else [found]
    return [number for number in ids if type(number) is int and number >= 0]


def chat_template_of(folder: Path, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the Jinja template of training: Alpaca's, or the tokenizer's; empty without one."""
    if read_prompt(folder)["prompt_template"] == "alpaca":
        return ALPACA_TEMPLATE
    return tokenizer.get_chat_template() if tokenizer.chat_template else ""


# ---- the file


@dataclass(frozen=True)
class WrittenGguf:
    """The files that were written. notes: what differs in llama.cpp or Ollama."""

    file: Path
    modelfile: Path
    notes: tuple[str, ...]

    def names(self, folder: Path | None = None) -> GgufNames:
        """Return the paths of the files, or their paths in a folder."""
        paths = [path if folder is None else path.relative_to(folder) for path in (self.file, self.modelfile)]
        return GgufNames(str(paths[0]), str(paths[1]))


def write_gguf(folder: Path, file: Path, kind: str, *, trust_remote_code: bool = False) -> WrittenGguf:
    """Write the model in `folder` as a GGUF file, one tensor in memory at a time, and a Modelfile. Raises UserError.

    The file has a temporary name until it is complete.
    """
    import gguf

    content = read_content(folder, kind, file.stem, trust_remote_code=trust_remote_code)
    family = gguf_family(content.config)
    planned = plan_tensors(folder, content.config, family, kind)
    make_out_folder(file.parent, "--out")
    _check_room(file, planned)
    writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[family.architecture]])
    for key, value in content.metadata.items():
        _add(writer, key, value)
    partial = file.with_name(f".{file.name}.partial")
    remove_partial = partial_function(partial.unlink, missing_ok=True)
    try:
        with before_leaving(remove_partial):
            _write_tensors(writer, planned, content.config, partial)
        os.replace(partial, file)
    except BaseException as error:
        remove_partial()
        if isinstance(error, OSError) and error.errno is None:  # numpy says how much was written, and not why
            raise cannot_write(f"The GGUF file {file}", message_of(error), trains=False) from error
        raise
    modelfile, notes = write_modelfile(folder, file, content)
    return WrittenGguf(file, modelfile, (*content.notes, *planned.notes, *notes))


def _check_room(file: Path, planned: GgufTensors) -> None:
    needed = sum(tensor.n_bytes for tensor in planned.tensors)
    free = shutil.disk_usage(file.parent).free
    if needed > free:
        raise UserError(
            f"--gguf: {file.name} needs {format_bytes(needed)}, and {format_bytes(free)} are free in {file.parent}.",
            hint="Make room, or name another folder with --out.",
            exit_code=1,
        )


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _write_tensors(writer: GGUFWriter, planned: GgufTensors, config: PreTrainedConfig, partial: Path) -> None:
    import gguf

    for tensor in planned.tensors:
        kind = gguf.GGMLQuantizationType[tensor.kind]
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.n_bytes, raw_dtype=kind)
    try:
        writer.write_header_to_file(partial)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in planned.tensors:
            writer.write_tensor_data(read_tensor(tensor, config))
    finally:
        writer.close()


# ---- Ollama


def write_modelfile(folder: Path, file: Path, content: GgufContent) -> tuple[Path, list[str]]:
    """Write Ollama's Modelfile next to a GGUF file, and return it with notes. An earlier one stays as it is."""
    import gguf

    prompt = read_prompt(folder)
    notes = []
    template = _ollama_template(folder, content)
    if template is None:
        notes.append(
            "the Modelfile has no TEMPLATE, as the chat template is more than fixed texts around turns: Ollama uses the"
            " one of the GGUF file if it knows it."
        )
    system = prompt["system_prompt"]
    if system is not None and '"""' in system:
        system = None
        notes.append('the Modelfile has no SYSTEM, as the system prompt holds """: send it with each request.')
    keys = gguf.Keys.Tokenizer
    ids = [int(str(content.metadata[key])) for key in (keys.EOS_ID, keys.EOT_ID) if key in content.metadata]
    path = file.parent / "Modelfile"
    if os.path.lexists(path):
        path = path.with_name(f"Modelfile-{file.stem}")
    text = modelfile(
        file.name,
        template=template,
        system=system,
        stops=[str(token) for token in content.tokenizer.convert_ids_to_tokens(ids)],
        context=metadata_context(content.metadata),
        comment=f"ollama create {file.stem.lower()} -f {path.name}",
    )
    write_new(path, text)
    return path, notes


def _ollama_template(folder: Path, content: GgufContent) -> str | None:
    """Return the Go template of the prompt format of training, or None if there is none."""
    import gguf

    if read_prompt(folder)["prompt_template"] == "raw":
        return PLAIN_TEMPLATE
    source = chat_template_of(folder, content.tokenizer)
    if not source:
        return PLAIN_TEMPLATE
    if "strftime_now" in source:  # the date of today would stay in the template
        return None
    texts = turn_texts(partial_function(_render, folder, content.tokenizer, source))
    adds_bos = content.metadata[gguf.Keys.Tokenizer.ADD_BOS]
    return None if texts is None else go_template(texts, bos=str(content.tokenizer.bos_token) if adds_bos else "")


def _render(folder: Path, tokenizer: PreTrainedTokenizerBase, source: str, messages: Sequence[dict[str, str]]) -> str:
    """Return the prompt of a conversation, with the variables of training."""
    variables = {**tokenizer.special_tokens_map, **read_prompt(folder).get("chat_template_kwargs", {})}
    name = template_name(tokenizer)
    return render_chat_template(source, messages, name=name, add_generation_prompt=True, **variables)[0]


def _begins_with_special(folder: Path, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether prompts of training begin with a special token: those of a chat template write BOS themselves."""
    source = chat_template_of(folder, tokenizer)
    if read_prompt(folder)["prompt_template"] != "chat" or not source:
        return False
    try:
        text = _render(folder, tokenizer, source, conversation(1))
    except TemplateRefusalError:
        return False
    return text.startswith(tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special))
