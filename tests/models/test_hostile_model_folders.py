"""Model folders from anyone: `train`, `generate` and `export` refuse damaged ones in one sentence and run no code."""

import json
import logging
import os
import pickle
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from command_line import run_here
from safetensors.torch import load_file, save_file

import ligertune.run  # noqa: F401  the first command would wait for its imports

INDEX = "model.safetensors.index.json"
RECIPE = "model: {model_name_or_path: ./model}\ndata: {datasets: [{path: d.jsonl}]}\ncheckpoint: {output_dir: out}\n"
CODE = "open({marker!r}, 'w').close()\n"
EVERY = ("train", "generate", "export")
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
    return lambda folder: _change(folder / "config.json", changes)


def _change(path: Path, changes: dict) -> None:
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


def weights(change: Callable[[dict], object]) -> Callable[[Path], object]:
    """Change the tensors of model.safetensors in place."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

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


def own_code(file: str, **names: str) -> Callable[[Path], object]:
    """Let `file` name classes in evil.py, which leaves a marker when it is imported."""

    def damage(folder: Path) -> None:
        (folder / "evil.py").write_text(CODE.format(marker=str(folder.parent / "marker")))
        (folder / "custom_generate").mkdir()
        shutil.copy(folder / "evil.py", folder / "custom_generate" / "generate.py")
        changes = {"auto_map": {name: f"evil.{target}" for name, target in names.items()}}
        if file == "config.json":
            changes["model_type"] = "evil"
        else:
            changes["tokenizer_class"] = "EvilTokenizer"
        _change(folder / file, changes)

    return damage


WOBBLE = {"rope_type": "wobble", "rope_theta": 10000.0}
CONFIG, TOKENIZER = "config.json", "tokenizer_config.json"
CASES = (
    Hostile("config is a list", write(CONFIG, []), ("config.json holds a list",)),
    Hostile("config is null", write(CONFIG, None), ("config.json holds null",)),
    Hostile("config is empty", write(CONFIG, ""), ("config.json is not a valid JSON file",)),
    Hostile("config is not UTF-8", write(CONFIG, b'{"a": "\xff"}'), ("config.json is not a valid JSON file",)),
    Hostile("config nested", write(CONFIG, '{"a": ' * 50_000), ("config.json", "nested too deeply")),
    Hostile("config nested lists", write(CONFIG, '{"a":' + "[" * 50_000 + "]" * 50_000 + "}"), ("nested too deeply",)),
    Hostile("no heads", config(num_attention_heads=0), ("config.json: num_attention_heads is 0",)),
    Hostile("7 heads", config(num_attention_heads=7), ("num_attention_heads is 7", "num_key_value_heads: 4")),
    Hostile("7 of 64", config(num_attention_heads=7, num_key_value_heads=7, head_dim=None), ("hidden_size is 64",)),
    Hostile("negative width", config(hidden_size=-64), ("hidden_size is -64",)),
    Hostile("width is a text", config(hidden_size="64"), ('hidden_size is "64"', "whole number")),
    Hostile("width is NaN", config(hidden_size=float("nan")), ("hidden_size is NaN",)),
    Hostile("a billion layers", config(num_hidden_layers=10**9), ("num_hidden_layers is 1000000000",)),
    Hostile("a trillion tokens", config(vocab_size=10**12), ("vocab_size is 1000000000000",)),
    Hostile("quadrillions", config(hidden_size=2**18, intermediate_size=2**22, num_hidden_layers=4096), ("make a",)),
    Hostile("16 million tokens", config(vocab_size=2**24), ("model.embed_tokens.weight", "[512, 64]"), LOADING),
    Hostile("billions", config(num_hidden_layers=300, head_dim=4096), ("shape",), ("generate",)),
    Hostile("an unknown activation", config(hidden_act="wobble"), ("hidden_act is wobble",), LOADING),
    Hostile("an unknown RoPE", config(rope_parameters=WOBBLE), ("rope_parameters.rope_type is wobble",), LOADING),
    Hostile("an unknown dtype", config(dtype="float33"), ("config.json", "float33")),
    Hostile("a padding id", config(pad_token_id=10**6), ("config.json", "cannot be used"), LOADING),
    Hostile("no weights", lambda folder: (folder / "model.safetensors").unlink(), ("holds no model.safetensors",)),
    Hostile("empty weights", write("model.safetensors", b""), ("model.safetensors is not a complete safetensors",)),
    Hostile("cut weights", write("model.safetensors", b"\x10\0\0\0\0\0\0\0{}"), ("not a complete safetensors",)),
    Hostile("missing weights", weights(lambda w: w.pop("model.norm.weight")), ("lacks 1", "norm.weight"), LOADING),
    Hostile(
        "weights of another model",
        weights(lambda w: w.update({"model.layers.5.mlp.up_proj.weight": torch.ones(172, 64)})),
        ("holds 1 weight", "model.layers.5.mlp.up_proj.weight"),
        LOADING,
    ),
    Hostile(
        "another shape",
        weights(lambda w: w.update({"model.norm.weight": torch.ones(65)})),
        ("model.norm.weight", "[64]", "[65]"),
        LOADING,
    ),
    Hostile("NaN", weights(lambda w: [t.fill_(float("nan")) for t in w.values()]), ("hold NaN (model.emb",), LOADING),
    Hostile("a pickle", pickled, (".bin weights", "other Python objects"), LOADING),
    Hostile("a .bin of text", lambda folder: (pickled(folder), write("pytorch_model.bin", "hello")(folder)),
            (".bin weights", "damaged"), LOADING),
    Hostile("an index without a map", indexed({"metadata": {}}), (INDEX, "weight_map")),
    Hostile("an index that is a list", indexed([]), (INDEX, "holds a list")),
    Hostile("an index of numbers", indexed(all_in(5)), (INDEX, "'5'")),
    Hostile("an index of a missing file", indexed(all_in("y.safetensors")), (INDEX, "y.safetensors, which is not")),
    Hostile("an index of a text", indexed(all_in("config.json")), (INDEX, "'config.json'")),
    Hostile("an index above", indexed(all_in("../x.safetensors"), "../x.safetensors"), (INDEX, "own folder")),
    Hostile("an absolute index", indexed(all_in("/etc/x.safetensors")), (INDEX, "own folder")),
    Hostile("an index over a link", linked_out, ("x.safetensors is a link", "outside")),
    Hostile("weights elsewhere", config(transformers_weights="../x.safetensors"), ("own folder",)),
    Hostile("tokenizer.json is empty", write("tokenizer.json", {}), ("tokenizer.json is not a tokenizer",)),
    Hostile("tokenizer.json is cut", write("tokenizer.json", '{"version":'), ("tokenizer.json is not a valid JSON",)),
    Hostile("tokenizer_config is a list", write(TOKENIZER, []), (f"{TOKENIZER} holds a list",)),
    Hostile("a class of no name", lambda f: _change(f / TOKENIZER, {"tokenizer_class": 5}), ("okenizer",)),
    Hostile("a template of no text", lambda f: ((f / "chat_template.jinja").unlink(),
            _change(f / TOKENIZER, {"chat_template": 5})), ("chat_template",)),
    Hostile("its own code", own_code(CONFIG, AutoConfig="C", AutoModelForCausalLM="M"), ("own Python code",)),
    Hostile("a tokenizer's own code", own_code(TOKENIZER, AutoTokenizer="T"), ("own Python code",)),
)  # fmt: skip
ALLOW = {
    "train": "write model.trust_remote_code: true",
    "generate": "add --trust-remote-code",
    "export": "add --trust-remote-code",
}


@pytest.fixture
def place(tmp_path, quickstart, monkeypatch):
    """The working directory, with a good model folder, data and a recipe."""
    monkeypatch.setattr(logging, "raiseExceptions", False)  # transformers' logger keeps the stderr of an earlier test
    shutil.copytree(quickstart / "stories260K", tmp_path / "model")
    (tmp_path / "d.jsonl").write_text('{"instruction": "Say hello.", "output": "Hello."}\n' * 8)
    (tmp_path / "r.yaml").write_text(RECIPE)
    return tmp_path


def refused(place: Path, command: str, *more: str, model: str = "./model") -> str:
    """Run a command on the model, which must be refused in one sentence, quickly. Returns the sentence."""
    arguments = {"train": ["r.yaml"], "generate": [model, "Hi."], "export": [model, "--out", "exported"]}[command]
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


@pytest.mark.parametrize("command", EVERY)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_hostile_folder_is_refused_in_one_sentence(case, command, place):
    if command not in case.commands:
        pytest.skip("the command does not read this")
    case.damage(place / "model")
    sentence = refused(place, command)
    for words in case.says:
        assert words in sentence
    if "code" in case.name:
        assert ALLOW[command] in sentence
