"""Model folders that someone else made: changes of a good folder, and the check that a command refuses one."""

import json
import os
import pickle
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file

import ligertune.run  # noqa: F401  the first command would wait for its imports
from support.command_line import run_here

CONFIG, TOKENIZER = "config.json", "tokenizer_config.json"
INDEX = "model.safetensors.index.json"
RECIPE = "model: {model_name_or_path: ./model}\ndata: {datasets: [{path: d.jsonl}]}\ncheckpoint: {output_dir: out}\n"
CODE = "open({marker!r}, 'w').close()\n"
OWN_CLASSES = """
from transformers import LlamaConfig, LlamaForCausalLM
class C(LlamaConfig):
    model_type = "evil"
class M(LlamaForCausalLM):
    config_class = C
"""
EVERY = ("train", "generate", "export")
ARGUMENTS = {
    **dict.fromkeys(("train", "plan", "medusa", "data"), ("r.yaml",)),
    "generate": ("./model", "Hi."), "chat": ("./model",), "export": ("./model", "--out", "exported"),
}  # fmt: skip
LOADING = ("train", "generate")  # export copies a whole model without loading its weights


@dataclass(frozen=True)
class Hostile:
    """A change of a good model folder, and the words of the sentence that refuses it."""

    name: str
    damage: Callable[[Path], object]
    says: tuple[str, ...]
    commands: tuple[str, ...] = EVERY


def write(file: str, content: object) -> Callable[[Path], object]:
    """Write a file: bytes, text, or a value as JSON."""
    text = content if isinstance(content, bytes | str) else json.dumps(content)
    data = text if isinstance(text, bytes) else text.encode()
    return lambda folder: (folder / file).write_bytes(data)


def config(**changes: object) -> Callable[[Path], object]:
    return lambda folder: change_json(folder / "config.json", changes)


def change_json(path: Path, changes: dict) -> None:
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


def weights(change: Callable[[dict], object], file: str = "model.safetensors") -> Callable[[Path], object]:
    """Change the tensors of a file in place."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / file)
        change(tensors)
        save_file(tensors, folder / file, metadata={"format": "pt"})

    return damage


def indexed(index: object, file: str = "x.safetensors") -> Callable[[Path], object]:
    """Move the weights to `file`, and write an index."""

    def damage(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / file)
        (folder / INDEX).write_text(json.dumps(index))

    return damage


def all_in(file: str) -> dict:
    return {"metadata": {}, "weight_map": {"model.embed_tokens.weight": file, "model.norm.weight": file}}


def linked_out(folder: Path) -> None:
    indexed(all_in("x.safetensors"), "../x.safetensors")(folder)
    os.symlink(folder.parent / "x.safetensors", folder / "x.safetensors")


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(str(folder.parent / "marker"))))


class Evil:
    """Writes a file where it is unpickled."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return open, (self.marker, "w")


def own_code(file: str, tokenizer_class: str = "EvilTokenizer", **names: str) -> Callable[[Path], object]:
    """Let `file` name classes in evil.py, which leaves a marker when it is imported."""

    def damage(folder: Path) -> None:
        (folder / "evil.py").write_text(CODE.format(marker=str(folder.parent / "marker")))
        (folder / "custom_generate").mkdir()
        shutil.copy(folder / "evil.py", folder / "custom_generate" / "generate.py")
        changes = {"auto_map": {name: f"evil.{target}" for name, target in names.items()}}
        if file == "config.json":
            changes["model_type"] = "evil"
        else:
            changes["tokenizer_class"] = tokenizer_class
        change_json(folder / file, changes)

    return damage


def refused(place: Path, command: str, *more: str, model: str = "./model") -> str:
    """Run a command on the model, which must be refused in one sentence, quickly. Returns the sentence."""
    arguments = [model if argument == "./model" else argument for argument in ARGUMENTS[command]]
    files = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    start = time.monotonic()
    done = run_here(command, *arguments, *more, cwd=place)
    assert time.monotonic() - start < 20  # several times what a loaded machine needs
    errors = [line for line in done.err.splitlines() if line.startswith("Error: ")]
    assert done.code in (1, 2) and len(errors) == 1 and "Traceback" not in done.err, done.err[-3000:]
    assert not (place / "marker").exists()
    left = [path for path in place.rglob("*") if path.is_file() and path not in files]
    assert command == "train" or not left
    return errors[0]
