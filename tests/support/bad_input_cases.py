"""Kinds of bad input: the files, the command, and the words that its error message must contain."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

REQUIRED = "model: {model_name_or_path: MODEL}\ndata: {datasets: [{path: DATA}]}\ncheckpoint: {output_dir: runs/one}\n"
GOOD = {"instruction": "Say hello.", "output": "Hello."}


@dataclass(frozen=True)
class Bad:
    """`ligertune *argv` in a folder of `files`, with `variables` set. A valid r.yaml is the default."""

    kind: str
    name: str
    says: tuple[str, ...]
    argv: tuple[str, ...] = ("train", "r.yaml")
    files: dict[str, bytes | str] = field(default_factory=dict)
    prepare: Callable[[Path], object] | None = None  # makes the folder invalid
    variables: dict[str, str] = field(default_factory=dict)
    code: int = 2


def recipe(name: str, more: str, *says: str) -> Bad:
    """A recipe of the required keys (lines 1 to 3) and `more` (from line 4)."""
    return Bad("recipe", name, says, files={"r.yaml": REQUIRED + more})


def yaml(name: str, text: bytes | str, *says: str) -> Bad:
    return Bad("YAML", name, says, files={"r.yaml": text})


def set_(name: str, override: str, *says: str) -> Bad:
    return Bad("recipe", name, says, argv=("train", "r.yaml", "--set", override))


def model(name: str, prepare: Callable[[Path], object], *says: str) -> Bad:
    """A model folder, copied from the quickstart's, that `prepare` makes invalid."""
    return Bad("model", name, says, prepare=prepare)


def data(name: str, content: bytes | str, *says: str, file: str = "d.jsonl") -> Bad:
    text = REQUIRED.replace("DATA", f"'{file}'")
    return Bad("data", name, says, files={"r.yaml": text, file: content})


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "model" / name).unlink()


def with_config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "model" / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def overwritten(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / "model" / name).write_bytes(content)


def cut_short(folder: Path) -> None:
    path = folder / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


CASES = (
    yaml("an empty file", "", "r.yaml is empty"),
    yaml("a list", "- model\n", "a recipe is a mapping"),
    yaml("one word", "model", "a recipe is a mapping"),
    yaml("a tab", "model:\n\tmodel_name_or_path: a\n", "r.yaml:2:", "a tab"),
    yaml("an open bracket", "model: {\n", "r.yaml:2:", "not YAML"),
    yaml("Latin-1", b"# caf\xe9\nmodel: {}\n", "r.yaml:1:", "not UTF-8"),
    yaml("a zero byte", b"model: \x00\n", "r.yaml:1:", "U+0000"),
    yaml("an object of Python", "model: !!python/object:os.system {}\n", "r.yaml:1:"),
    yaml("an anchor that contains itself", "model: &a [*a]\n", "r.yaml"),
    yaml("a key that is a list", "? [a, b]\n: 1\n", "r.yaml:1:", "a key must be a single scalar"),
    Bad("YAML", "no such file", ("nowhere.yaml does not exist",), argv=("train", "nowhere.yaml")),
    Bad("YAML", "a folder", ("is a folder, not a recipe",), argv=("train", ".")),
    recipe("a key given twice", "train: {seed: 1, seed: 2}\n", "r.yaml:4:", "given twice"),
    recipe("a misspelt key", "train: {learning_rat: 1.0e-3}\n", "r.yaml:4:", "Did you mean train.learning_rate?"),
    recipe("a key in the wrong section", "eval: {learning_rate: 1.0e-3}\n", "belongs under `train`"),
    recipe("a key with dots", "train.seed: 1\n", "written with dots"),
    recipe("a word for a number", "train: {learning_rate: fast}\n", '"fast"', "a number"),
    recipe("a number out of range", "train: {learning_rate: 2}\n", "at most 1"),
    recipe("a negative number", "train: {max_steps: -5}\n", "above 0"),
    recipe("not a number", "train: {learning_rate: .nan}\n", "train.learning_rate"),
    recipe("a fraction for an integer", "train: {seed: 1.5}\n", "an integer"),
    recipe("a misspelt choice", "train: {lr_scheduler_type: cosin}\n", "Did you mean cosine?"),
    recipe("a list for a section", "train: [1]\n", "r.yaml:4:", "a mapping"),
    recipe("a version of the future", "version: 2\n", "version is 2"),
    recipe("max_steps and num_train_epochs", "train: {max_steps: 5, num_train_epochs: 1}\n", "both given"),
    recipe("a batch that does not divide", "train: {global_batch_size: 7}\n", "not a multiple"),
    recipe("an evaluation without data", "eval: {eval_strategy: steps}\n", "no evaluation data"),
    recipe("a layer count for a pretrained model", "model.num_hidden_layers: 2\n", "written with dots"),
    recipe("a constant schedule's warm-up", "train: {warmup_steps: 5, lr_scheduler_type: constant}\n",
           "constant_with_warmup"),
    recipe("a key and its alias differ", "lr: 1.0e-3\ntrain: {learning_rate: 1.0e-4}\n", "different values"),
    yaml("no model", "data: {datasets: [{path: a/b}]}\ncheckpoint: {output_dir: o}\n", "model_name_or_path is missing"),
    yaml("no data", "model: {model_name_or_path: a/b}\ncheckpoint: {output_dir: o}\n", "data.datasets is missing"),
    yaml("no output folder", REQUIRED.rpartition("checkpoint")[0], "checkpoint.output_dir is missing"),
    set_("an override without a value", "train.seed", "section.key=value"),
    set_("an override of no key", "train.sede=1", "train.seed"),
    set_("an override inside a number", "train.seed.x=1", "train.seed"),
    set_("streaming without an end", "data.streaming=true", "train.max_steps"),
    set_("all data for evaluation", "data.val_split=1", "below 1"),
    Bad("model", "no such folder", ("there is no folder ./no-model",),
        files={"r.yaml": REQUIRED.replace("MODEL", "./no-model")}),
    model("no config.json", without("config.json"), "holds no config.json"),
    model("an invalid config.json", overwritten("config.json", b"{"), "config.json"),
    model("an unknown architecture", with_config(model_type="no_such_model"), "no_such_model"),
    model("a model without a language-model head", with_config(model_type="bert"), "model.model_name_or_path"),
    model("no weights", without("model.safetensors"), "model.model_name_or_path"),
    model("weights cut short", cut_short, "model.safetensors"),
    model("weights of another shape", with_config(hidden_size=32, head_dim=4), "model.model_name_or_path"),
    model("no tokenizer", without("tokenizer.json"), "okenizer"),
    model("an invalid tokenizer.json", overwritten("tokenizer.json", b"{"), "okenizer"),
    set_("an unknown padding token", "model.tokenizer.pad_token=<nothing>", "model.tokenizer.pad_token"),
    set_("an unknown end token", "model.tokenizer.eos_token=<nothing>", "model.tokenizer.eos_token"),
    set_("a missing chat template", "model.tokenizer.chat_template=no.jinja", "chat_template"),
    set_("a missing prompt template", "data.prompt_template=no.jinja", "data.prompt_template"),
    data("an empty file", "", "d.jsonl"),
    data("nothing to train on", lines({**GOOD, "output": ""}), "d.jsonl"),
    data("a row that is not an object", lines(GOOD) + "[1]\n", "d.jsonl:2"),
    data("an unknown file ending", "x", "d.xlsx", file="./d.xlsx"),
    Bad("data", "examples longer than the model's context", ("context", "512", "data.max_length"),
        argv=("train", "r.yaml", "--set", "data.max_length=4096"),
        files={"data.jsonl": lines(GOOD, {**GOOD, "output": "many words " * 300})}),
    data("a glob without a match", lines(GOOD), "*.nothing", file="*.nothing"),
    Bad("data", "no such file", ("there is no file or folder nowhere.jsonl",),
        files={"r.yaml": REQUIRED.replace("DATA", "nowhere.jsonl")}),
    set_("half precision on a CPU", "model.dtype=float16", "model.dtype: float16"),
    set_("flash attention on a CPU", "model.attn_implementation=flash_attention_2", "flash_attention_2 cannot be used"),
    set_("varlen attention on a CPU", "model.attn_implementation=varlen", "varlen cannot be used"),
    Bad("disk", "the folder of the run is a file", ("output_dir", "is a file"), files={"runs/one": ""}),
    Bad("disk", "the folder of the run lies in a file", ("output_dir",), files={"runs": ""}),
    Bad("disk", "the folder of the run cannot be made", ("checkpoint.output_dir", "/proc/none"),
        argv=("train", "r.yaml", "--set", "checkpoint.output_dir=/proc/none")),
    Bad("disk", "the folder holds a run", ("already holds a run",), files={"runs/one/plan.json": "{}"}),
    Bad("disk", "a page in a missing folder", ("--out", "not exist"), argv=("data", "r.yaml", "--out", "no/page.html")),
    Bad("disk", "no checkpoint to resume", ("nowhere",),
        argv=("train", "r.yaml", "--set", "checkpoint.resume_from_checkpoint=./nowhere")),
    Bad("environment", "a cache that cannot be made", ("LIGERTUNE_CACHE",), variables={"LIGERTUNE_CACHE": "/proc/none"},
        code=1),
    Bad("environment", "a RANK that is not a number", ("RANK",), variables={"RANK": "first"}),
    Bad("environment", "a WORLD_SIZE that is not a number", ("WORLD_SIZE",), variables={"WORLD_SIZE": "two"}),
    Bad("command", "an unknown op", ("There is no op",), argv=("bench", "no_such_op")),
    Bad("command", "a missing model to generate with", ("there is no folder",), argv=("generate", "./nowhere", "Hi.")),
    Bad("command", "a file of no known tool", ("has none of the keys",), argv=("recipe", "import", "r.yaml")),
    Bad("command", "an existing file to write a recipe to", ("exists already",),
        argv=("init", "a/b", "c/d", "--out", "r.yaml")),
)  # fmt: skip
