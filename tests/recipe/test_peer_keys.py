"""Every key that Axolotl, LLaMA-Factory, TRL, torchtune and unsloth document is in the import's tables.

peer_keys.yaml holds the names. A key is known if it becomes one of ours, or is left out or refused with its own reason.
"""

from pathlib import Path

import pytest
import yaml

from ligertune.errors import UserError
from ligertune.recipe.importers.explain import meaning_of
from ligertune.recipe.importers.import_recipe import UNKNOWN, convert
from ligertune.recipe.importers.import_state import UNTRACED

RECORDED = yaml.safe_load(Path(__file__).with_name("peer_keys.yaml").read_text("utf-8"))
TRL = {"model_name_or_path": "a/b", "dataset_name": "x/y", "dataset_train_split": "train"}
# the smallest file of each tool
FILES = {
    "Axolotl": {"base_model": "a/b", "sequence_len": 9, "datasets": [{"path": "x/y"}], "adapter": "lora"},
    "LLaMA-Factory": {
        "model_name_or_path": "a/b",
        "stage": "sft",
        "dataset": "x/y",
        "cutoff_len": 9,
        "template": "llama3",
    },
    "LLaMA-Factory, new trainer": {"model": "a/b", "train_dataset": "x/y", "peft_config": {"name": "lora"}},
    "TRL": TRL,
    "TRL, other commands": TRL,
    "torchtune": {
        "model": {"_component_": "torchtune.models.llama3_2.llama3_2_1b"},
        "checkpointer": {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": "m"},
        "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer"},
        "dataset": {"_component_": "torchtune.datasets.chat_dataset", "source": "x/y"},
        "optimizer": {"_component_": "torch.optim.AdamW"},
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
    },
    "unsloth": {"model": "a/b", "data": {"dataset": "x/y"}, "training": {"max_seq_length": 9}, "lora": {"lora_r": 8}},
}
ODD = 7  # not the default of any switch, and for most keys no valid value
NAME = "odd"  # in data sets, where most keys hold names
LISTS = ("datasets", "lr_groups", "role_boundaries")  # sections that are lists of sections


def recorded_paths(tool: str) -> list[tuple[str, ...]]:
    """Return where each recorded key stands: ("optimizer", "lr")."""
    rows = RECORDED[tool]
    if tool in ("LLaMA-Factory", "TRL"):
        rows = rows | {"keys": f"{rows['keys']} {RECORDED['transformers']['keys']}"}
    found = []
    for section, names in rows.items():
        around = {"keys": (), "type of a data set": ("datasets", "type")}.get(section, (section,))
        found += [(*around, *name.split(".")) for name in (names.split() if section != "source" else ())]
    return list(dict.fromkeys(found))


def put(values: dict, path: tuple[str, ...], value: object) -> None:
    """Add a key to a file, unless the file has it."""
    for name in path[:-1]:
        inner = values.setdefault(name, [{"path": "x/y"}] if name in LISTS else {})
        if isinstance(inner, list):
            inner = inner[0]
        elif not isinstance(inner, dict):  # the section's own key, with an odd value
            inner = values[name] = {}
        values = inner
    values.setdefault(path[-1], value)


def file_with(tool: str, paths: list[tuple[str, ...]]) -> dict:
    file = yaml.safe_load(yaml.safe_dump(FILES[tool]))
    for path in paths:
        if path[0] == "datasets" and len(path) > 1:
            file.pop("dataset_name", None)
        put(file, path, NAME if path[0].startswith("dataset") else ODD)
    return file


def unknown_keys(tool: str, paths: list[tuple[str, ...]], file: Path) -> dict[str, str]:
    """Return the keys without a row in the tables, with what the import says about them."""
    file.write_text(yaml.safe_dump(file_with(tool, paths), sort_keys=False))
    found = convert(file)
    if found.refusals and len(paths) > 1:  # a refusal hides the other keys
        said = " ".join(str(problem) for _, problem in found.refusals)
        others = [path for path in paths if path[-1] not in said and f": {path[0]} is " not in said]
        halves = [others] if len(others) < len(paths) else [paths[::2], paths[1::2]]
        return {key: why for half in halves for key, why in unknown_keys(tool, half, file).items()}
    reasons = {at: fate.why for at, _, fate in found.accounts()}
    unknown = {}
    for path in paths if not found.refusals else ():
        about = [why for at, why in reasons.items() if set(path) <= {str(part) for part in at}]
        loud = [why for why in about if why == UNTRACED or why.startswith(UNKNOWN)]
        if loud or not about:
            unknown[".".join(path)] = (loud or ["not reported"])[0]
    return unknown


@pytest.mark.parametrize("tool", FILES)
def test_every_documented_key_is_in_the_tables(tool, tmp_path):
    file = tmp_path / "tool.yml"
    assert unknown_keys(tool, [], file) == {} and not convert(file).refusals
    unknown: dict[str, str] = {}
    paths = recorded_paths(tool)
    for start in range(0, len(paths), 40):
        unknown |= unknown_keys(tool, paths[start : start + 40], file)
    assert unknown == {}


@pytest.mark.parametrize("tool", FILES)
def test_every_documented_key_has_a_short_meaning(tool):
    meanings = {".".join(path): meaning_of(path) for path in recorded_paths(tool)}
    assert {key: words for key, words in meanings.items() if not 0 < len(words) <= 60} == {}


def test_a_key_that_no_tool_has_is_unknown(tmp_path):
    assert list(unknown_keys("Axolotl", [("no_such_key",), ("adapter",)], tmp_path / "tool.yml")) == ["no_such_key"]


# values of other types, for the sections whose keys functions convert
READ = (
    "model",
    "dataset",
    "loss",
    "lr_scheduler",
    "metric_logger",
    "kd_loss",
    "kd_ratio",
    "max_steps_per_epoch",
    "data",
)
OTHERS = [-1, "x", float("nan"), True, [1], [[1]], {"a": {"b": 1}}, [{"a": 1}, 2], "\x1b[2J\n"]


@pytest.mark.parametrize("tool", ["torchtune", "unsloth"])
def test_no_value_of_a_key_in_a_section_ends_in_a_traceback(tool, tmp_path):
    file = tmp_path / "tool.yml"
    paths = [path for path in recorded_paths(tool) if path[0] in READ]
    for number, path in enumerate(paths):
        value = OTHERS[number % len(OTHERS)]
        values: dict = {}
        put(values, path, value)
        base = file_with(tool, [])
        merged = base | {
            name: (base[name] | inner if isinstance(inner, dict) and isinstance(base.get(name), dict) else inner)
            for name, inner in values.items()
        }
        file.write_text(yaml.safe_dump(merged, sort_keys=False))
        try:
            found = convert(file)
            found.raise_refusals()
        except UserError as refused:
            assert "\x1b" not in str(refused)
            continue
        assert "\x1b" not in found.text and yaml.safe_load(found.text)
        assert [row["key"] for row in found.as_dict()["keys"] if row["why"] == UNTRACED] == []


def test_many_names_are_recorded_with_their_source():
    assert sum(len(recorded_paths(tool)) for tool in FILES) > 1400
    assert all(rows["source"] for rows in RECORDED.values())
