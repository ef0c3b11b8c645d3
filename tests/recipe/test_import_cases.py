"""`ligertune recipe import`: a table of files in other tools' styles, and what each becomes (imports.yaml)."""

import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from ligertune.cli.app import app
from ligertune.data.templates.named_templates import NAMES
from ligertune.errors import UserError
from ligertune.recipe import Recipe, load_recipe
from ligertune.recipe.aliases import ALIASES
from ligertune.recipe.document import keys, leaf
from ligertune.recipe.importers.import_recipe import import_recipe
from ligertune.recipe.importers.import_state import Import
from ligertune.recipe.importers.peer_templates import TEMPLATES
from ligertune.recipe.importers.peers import IMPORTED, TOOLS
from ligertune.recipe.importers.reasons import REASONS
from ligertune.recipe.read import read_document

CASES = yaml.load(Path(__file__).with_name("imports.yaml").read_text("utf-8"), Loader=yaml.CSafeLoader)
BASES = {
    "axolotl": {"base_model": "a/b", "datasets": "[{path: x/y, type: alpaca}]", "output_dir": "out"},
    "llama_factory": {"model_name_or_path": "a/b", "stage": "sft", "dataset": "x/y", "output_dir": "out"},
    "trl": {"model_name_or_path": "a/b", "dataset_name": "x/y", "output_dir": "out"},
}

# keys of the cases that leave no trace of their own: what they say is in other keys of the recipe, or is the default
IN_OTHER_KEYS = """
    dataset_splits num_labels test_split_size dataset_text_field peft_config dist_config kernel_config fp16
    special_tokens
    use_peft adapter finetuning_type
    disable_gradient_checkpointing activation_offloading load_in_4bit quantization_bit use_galore fsdp_config
    fsdp_version freeze_trainable_layers freeze_trainable_modules freeze_extra_modules peft_layers_to_transform
    reward_model wandb_project output_dir evaluation_strategy evals_per_epoch loss_type max_steps
    chat_template_jinja
"""


def text_of(case: dict) -> str:
    """Return the file of a case: its own lines, and those of the tool's small file that they do not replace."""
    tool = next(name for name in (*BASES, "whole") if name in case)
    own = case[tool]
    return own + "".join(f"{k}: {v}\n" for k, v in BASES.get(tool, {}).items() if not re.search(rf"^{k}:", own, re.M))


def value_of(recipe: Recipe, key: str) -> object:
    value = recipe.model_dump(mode="json")
    for name in key.split("."):
        value = value[int(name) if isinstance(value, list) else name]
    return value


def keys_without_trace(found: Import) -> set[str]:
    """Return the keys of the file that the import names nowhere."""
    named = {line.split(" -> ")[0] for line in found.translated} | {item.key for item in found.left}
    shown = " ".join([*named, *found.notes, *map(str, found.document.notices)])
    return {key for key in read_document(Path("tool.yml")).data if key not in re.findall(r"\w+", shown)}


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_a_file_of_another_tool(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in ({"tool.yml": text_of(case)} | case.get("files", {})).items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    if "refused" in case:
        with pytest.raises(UserError, match=case["refused"]):
            import_recipe(Path("tool.yml"))
        return
    found = import_recipe(Path("tool.yml"))
    Path("ours.yaml").write_text(found.text)
    recipe = load_recipe(Path("ours.yaml"))
    assert recipe.notices == ()
    expected = case.get("expect", {})
    assert {key: value_of(recipe, key) for key in expected} == {
        key: pytest.approx(value) if isinstance(value, float) else value for key, value in expected.items()
    }
    reasons = {item.key: item.why for item in found.left}
    for key, words in case.get("left", {}).items():
        assert words in reasons[key]
    assert case.get("says", "") in found.text
    assert keys_without_trace(found) <= set(IN_OTHER_KEYS.split())
    assert not [name for name in case.get("without", ()) if f"  {name}: " in found.text.rpartition("\n# ")[2]]


def test_the_cases_are_many_and_of_every_tool():
    assert len(CASES) >= 60 and len({case["name"] for case in CASES}) == len(CASES)
    assert all(sum(tool in case for case in CASES) >= 15 for tool in BASES)


def test_every_template_of_another_tool_is_a_built_in_one():
    assert set(TEMPLATES.values()) <= set(NAMES)


def test_no_key_that_has_a_counterpart_has_a_reason_why_it_has_none():
    counterparts = {leaf(key) for key in keys()} | {name for row in (*ALIASES, *IMPORTED) for name in row.names}
    assert set(REASONS) & counterparts <= {"chat_template"}  # a template's text has none


def test_no_default_of_a_tool_is_a_default_of_ours():
    """`Defaults of ...` in the recipe's comments are those that differ."""
    ours = Recipe.model_validate(
        {"model": {"model_name_or_path": "m"}, "data": {"datasets": [{"path": "d"}]}, "checkpoint": {"output_dir": "o"}}
    )
    same = {(tool.name, key) for tool in TOOLS for key, value in tool.defaults.items() if value_of(ours, key) == value}
    assert same == {("LLaMA-Factory", "data.max_length"), ("TRL", "train.learning_rate")}  # written as a reminder


def test_a_refusal_of_the_command_ends_with_exit_code_2_and_an_import_names_the_next_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("grpo.yml").write_text("base_model: a/b\nrl: grpo\ndatasets: [{path: x/y}]\n")
    refused = CliRunner().invoke(app, ["recipe", "import", "grpo.yml"])
    assert isinstance(refused.exception, UserError) and refused.exception.exit_code == 2
    Path("axolotl.yml").write_text("base_model: a/b\ndatasets: [{path: x/y}]\nlr_scheduler: rex\nnum_epochs: 2\n")
    done = CliRunner().invoke(app, ["recipe", "import", "axolotl.yml", "--out", "new.yaml"])
    lines = done.output.splitlines()
    assert "  num_epochs -> train.num_train_epochs: 2" in lines
    assert any(line.startswith("Defaults of Axolotl that differ") for line in lines)
    assert any(line.startswith("axolotl.yml:3: not imported: train.lr_scheduler_type") for line in lines)
    assert lines[-1] == "Run it: ligertune train new.yaml"
