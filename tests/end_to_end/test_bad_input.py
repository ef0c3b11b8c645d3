"""Bad input: one message of one sentence, the right exit code and no traceback; nothing is written.

One or two of each kind: the messages themselves are tested in tests/recipe, tests/data and tests/models.
"""

import json
import logging
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.command_line import RECIPE, run

REQUIRED = "model: {model_name_or_path: MODEL}\ndata: {datasets: [{path: DATA}]}\ncheckpoint: {output_dir: runs/one}\n"
TRAIN, SHOW = ("train", "r.yaml"), ("data", "r.yaml")
STREAM = (*TRAIN, "--set", "data.streaming=true", "--set", "train.max_steps=2")
DPO, KTO = ((*TRAIN, "--set", "task=dpo", "--set", f"preference.loss_type={kind}") for kind in ("sigmoid", "kto"))
GOOD = {"instruction": "Say hello.", "output": "Hello."}
PAIR = {"prompt": "Say hello.", "chosen": "Hello.", "rejected": "No."}


@dataclass(frozen=True)
class Bad:
    """`ligertune *argv` in a folder of `files`, with `variables` set. A valid r.yaml is the default."""

    kind: str
    name: str
    says: tuple[str, ...]
    argv: tuple[str, ...] = TRAIN
    files: dict[str, bytes | str] = field(default_factory=dict)
    prepare: Callable[[Path], object] | None = None  # makes the folder invalid
    variables: dict[str, str] = field(default_factory=dict)
    code: int = 2


def recipe(name: str, more: str, *says: str) -> Bad:
    """A recipe of the required keys (lines 1 to 3) and `more` (from line 4)."""
    return Bad("recipe", name, says, files={"r.yaml": REQUIRED + more})


def set_(name: str, override: str, *says: str) -> Bad:
    return Bad("recipe", name, says, argv=("train", "r.yaml", "--set", override))


def model(name: str, prepare: Callable[[Path], object], *says: str) -> Bad:
    """A model folder, copied from the quickstart's, that `prepare` makes invalid."""
    return Bad("model", name, says, prepare=prepare)


def data(name: str, content: bytes | str, *says: str, argv: tuple[str, ...] = TRAIN) -> Bad:
    return Bad("data", name, says, argv, {"r.yaml": REQUIRED.replace("DATA", "d.jsonl"), "d.jsonl": content})


def of_an_unknown_type(folder: Path) -> None:
    path = folder / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "no_such_model"}))


def cut_short(folder: Path) -> None:
    path = folder / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


CASES = (
    Bad("YAML", "no such file", ("nowhere.yaml does not exist",), argv=("train", "nowhere.yaml")),
    recipe("a misspelt key", "train: {learning_rat: 1.0e-3}\n", "r.yaml:4:", "Did you mean train.learning_rate?"),
    recipe("an open bracket", "train: {\n", "r.yaml:5:", "not YAML"),
    set_("an override of no key", "train.sede=1", "train.seed"),
    Bad("model", "no such folder", ("there is no folder ./no-model",),
        files={"r.yaml": REQUIRED.replace("MODEL", "./no-model")}),
    model("an unknown architecture", of_an_unknown_type, "no_such_model"),
    model("weights cut short", cut_short, "model.safetensors"),
    model("no tokenizer", lambda folder: (folder / "model" / "tokenizer.json").unlink(), "okenizer"),
    set_("a missing prompt template", "data.prompt_template=no.jinja", "data.prompt_template"),
    data("nothing to train on", lines({**GOOD, "output": ""}), "d.jsonl"),
    data("columns of no format", lines({"instruction": "a", "verdict": "b"}), "nearest is alpaca", argv=SHOW),
    data("preference pairs under sft", lines(PAIR), "are those of preference pairs. Write task: dpo to"),
    data("no pairs under dpo", lines(GOOD), "lack `chosen` and `rejected`, and task: dpo needs pairs", argv=DPO),
    data("labels under dpo", lines({**GOOD, "label": 1}), "trained on with preference.loss_type: kto", argv=DPO),
    data("pairs under kto", lines(PAIR), "lack `label`", "another preference.loss_type than kto", argv=KTO),
    data("no label under kto", lines(GOOD), "lack `label`, 1 or 0, which preference.loss_type: kto needs", argv=KTO),
    data("streamed pairs", lines(PAIR), "data.streaming: preference pairs", argv=(*STREAM, "--set", "task=dpo")),
    data("equal answers", lines({**PAIR, "rejected": "Hello."}), "1 equal answers", "d.jsonl:1", argv=DPO),
    data("an incomplete record", lines(GOOD) + '{"instruction": ', "d.jsonl:2:", "not JSON"),
    data("an incomplete record in a stream", lines(GOOD) + "{", "d.jsonl:2:", "not JSON", argv=STREAM),
    data("an image in a stream of text", lines({"images": ["a.png"], **GOOD}), "d.jsonl:1:", "text only", argv=STREAM),
    data("not UTF-8", lines(GOOD).encode() + b'{"instruction": "n\xe9"}', "d.jsonl:2:", "byte 0xe9", argv=SHOW),
    Bad("data", "a template that refuses its rows", ("data.jsonl:1 (no)", "the template refuses it"),
        argv=(*TRAIN, "--set", "data.prompt_template=t.jinja"), files={"t.jinja": "{{ raise_exception('no') }}"}),
    set_("a device as a prompt template", "data.prompt_template=/dev/zero", "cannot be read as a template file"),
    set_("a device as a chat template", "model.tokenizer.chat_template=/dev/zero", "there is no file /dev/zero"),
    Bad("data", "a template without an end", ("t.jinja: the chat template makes at least", "characters of text from"),
        argv=(*TRAIN, "--set", "data.prompt_template=t.jinja", "--set", "data.num_proc=2"),
        files={"t.jinja": "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
               "data.jsonl": lines(GOOD) * 2000}),
    Bad("model", "a chat template that calls itself", ("model/chat_template.jinja: the chat template calls itself",),
        argv=("generate", "./model", "Hi."),
        files={"model/chat_template.jinja": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"}),
    Bad("model", "a chat template that writes nothing", ("chat_template.jinja: the chat template makes no token",),
        argv=("generate", "./model", "Hi."), files={"model/chat_template.jinja": "{% set x = 1 %}"}),
    Bad("data", "examples longer than the model's context", ("context", "512", "data.max_length"),
        argv=("train", "r.yaml", "--set", "data.max_length=4096"),
        files={"data.jsonl": lines(GOOD, {**GOOD, "output": "many words " * 300})}),
    Bad("data", "no such file", ("there is no file or folder nowhere.jsonl",),
        files={"r.yaml": REQUIRED.replace("DATA", "nowhere.jsonl")}),
    Bad("data", "a file that cannot be read", ("d.jsonl cannot be read: Input/output error",),
        files={"r.yaml": REQUIRED.replace("DATA", "d.jsonl")},
        prepare=lambda folder: (folder / "d.jsonl").symlink_to("/proc/self/mem")),
    set_("a weight that leaves no example", "data.datasets[0].weight=0.00001", "makes 0 examples of the 8 of"),
    set_("flash attention on a CPU", "model.attn_implementation=flash_attention_2", "flash_attention_2 cannot be used"),
    Bad("disk", "the folder of the run is a file", ("output_dir", "is a file"), files={"runs/one": ""}),
    Bad("disk", "the folder of the run lies in a file", ("output_dir",), files={"runs": ""}),
    Bad("disk", "a run to replace that lies in a file", ("output_dir", "is a file"), files={"runs": ""},
        argv=(*TRAIN, "--overwrite")),
    Bad("disk", "a folder with too long a name", ("cannot be used: File name too long",),
        argv=("generate", "a" * 300, "Hi.")),
    Bad("disk", "an output folder with too long a name", ("checkpoint.output_dir", "at most 255 bytes"),
        argv=(*TRAIN, "--set", f"checkpoint.output_dir={'a' * 300}")),
    Bad("disk", "the folder of the run cannot be made", ("checkpoint.output_dir", "/proc/none"),
        argv=("train", "r.yaml", "--set", "checkpoint.output_dir=/proc/none")),
    Bad("disk", "the folder holds a run", ("already holds a run (metrics.jsonl)",),
        files={"runs/one/metrics.jsonl": '{"step": 1}\n'}),
    Bad("disk", "a page in a missing folder", ("--out", "not exist"), argv=("data", "r.yaml", "--out", "no/page.html")),
    Bad("disk", "no checkpoint to resume", ("nowhere",),
        argv=("train", "r.yaml", "--set", "checkpoint.resume_from_checkpoint=./nowhere")),
    Bad("environment", "a cache that cannot be made", ("LIGERTUNE_CACHE",), variables={"LIGERTUNE_CACHE": "/proc/none"},
        code=1),
    Bad("environment", "a RANK that is not a number", ("RANK",), variables={"RANK": "first"}),
    Bad("environment", "a WORLD_SIZE that is not a number", ("WORLD_SIZE",), variables={"WORLD_SIZE": "two"}),
    Bad("command", "a missing model to generate with", ("there is no folder",), argv=("generate", "./nowhere", "Hi.")),
)  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch, quickstart):
    """folder(case): make the working directory of a case."""
    monkeypatch.chdir(tmp_path)

    def folder(case: Bad):
        shutil.copytree(quickstart / "stories260K", tmp_path / "model")
        (tmp_path / "data.jsonl").write_text('{"instruction": "Say hello.", "output": "Hello."}\n' * 8)
        for name, content in {"r.yaml": REQUIRED, **case.files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            content = content.encode() if isinstance(content, str) else content
            path.write_bytes(content.replace(b"MODEL", b"./model").replace(b"DATA", b"data.jsonl"))
        if case.prepare:
            case.prepare(tmp_path)
        for name, value in case.variables.items():
            monkeypatch.setenv(name, value)
        return tmp_path

    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}: {case.name}")
def test_bad_input_is_refused_with_one_sentence(case, folder, ligertune, monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)  # transformers' logger keeps the stderr of an earlier test
    before = folder(case)
    files = {path: path.read_bytes() for path in before.rglob("*") if path.is_file() and not path.is_symlink()}
    done = ligertune(*case.argv)
    assert done.code == case.code, done.err
    assert "Traceback" not in done.err
    said = [line for line in done.err.splitlines() if line.startswith("Error:")]
    assert len(said) == 1, done.err
    for words in case.says:
        assert words in said[0], said[0]
    assert {path: path.read_bytes() for path in files} == files  # nothing lost, nothing overwritten


WITHOUT_TORCH = {
    "unknown key": "train.learning_rat=0.001",
    "key of another section": "model.learning_rate=0.001",
    "wrong type": "train.learning_rate=fast",
    "missing data file": "data.datasets.0.path=nowhere.jsonl",
    "missing model folder": "model.model_name_or_path=./no-model",
}
REFUSE_ALL = """
import sys
from ligertune.cli.app import main
recipe, *overrides = sys.argv[1:]
for override in overrides:
    sys.argv = ["ligertune", "train", recipe, "--set", override]
    try:
        main()
    except SystemExit as end:
        assert end.code == 2, override
    assert not {"torch", "transformers", "datasets"} & set(sys.modules), override
"""


def test_torch_is_not_imported_to_refuse_a_recipe(tmp_path):
    done = run([sys.executable, "-c", REFUSE_ALL, str(RECIPE), *WITHOUT_TORCH.values()], cwd=tmp_path)
    assert done.code == 0 and done.err.count("Error:") == len(WITHOUT_TORCH), done.err


def test_a_closed_pipe_gives_no_traceback(tmp_path):
    """`ligertune recipe show ... | head -1`."""
    done = run(["bash", "-c", f"'{sys.executable}' -m ligertune recipe show '{RECIPE}' | head -1"], cwd=tmp_path)
    assert "Traceback" not in done.err and done.out == "version: 1\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_output_that_cannot_be_written_is_no_interrupted_run(tmp_path):
    done = run(["bash", "-c", f"'{sys.executable}' -m ligertune recipe show '{RECIPE}' > /dev/full"], cwd=tmp_path)
    assert done.code == 1 and "Error: The output could not be written: No space left" in done.err
    assert "--resume" not in done.err
