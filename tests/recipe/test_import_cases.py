"""`ligertune recipe import`: a table of files in other tools' styles, and what each becomes (imports.yaml)."""

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from ligertune.cli.app import app
from ligertune.data.templates.bounded_jinja import BUILT_IN
from ligertune.errors import UserError
from ligertune.recipe import Recipe, load_recipe
from ligertune.recipe.aliases import ALIASES
from ligertune.recipe.document import keys, leaf
from ligertune.recipe.importers.import_recipe import import_recipe, peer_of
from ligertune.recipe.importers.import_state import UNTRACED, Import
from ligertune.recipe.importers.import_tables import HARMS, IMPORTED, REASONS, TEMPLATES, TOOLS
from ligertune.recipe.read import read_document

CASES = yaml.load(Path(__file__).with_name("imports.yaml").read_text("utf-8"), Loader=yaml.CSafeLoader)
BASES = {
    "axolotl": {"base_model": "a/b", "datasets": "[{path: x/y, type: alpaca}]", "output_dir": "out"},
    "llama_factory": {"model_name_or_path": "a/b", "stage": "sft", "dataset": "x/y", "output_dir": "out"},
    "trl": {"model_name_or_path": "a/b", "dataset_name": "x/y", "output_dir": "out"},
}

# keys whose values in the cases are defaults of the recipe, which it does not hold
SAYS_A_DEFAULT = (
    "disable_gradient_checkpointing", "stage", "loss_type", "save_total_limit", "test_split_size", "max_steps",
    "num_train_epochs", "adapter", "fsdp_config", "dataset_text_field", "finetuning_type", "peft_config", "bf16",
    "template", "chat_template", "loss", "enable_wandb", "use_comet", "eval_steps",
)  # fmt: skip


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


def flattened(value: object, path: str = "") -> dict[str, object]:
    """Return every key of a file that holds no other keys: {"datasets[0].path": "x/y"}."""
    if isinstance(value, dict) and value:
        rows = {f"{path}.{name}".lstrip("."): item for name, item in value.items()}
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        rows = {f"{path}[{index}]": item for index, item in enumerate(value)}
    else:
        return {path: value}
    return {key: inner for name, item in rows.items() for key, inner in flattened(item, name).items()}


def check_accounts(found: Import, text: str) -> None:
    """Every key of the file is reported once, with a reason if it was not imported, and none is unaccounted for."""
    report = found.as_dict()
    file = flattened(yaml.safe_load(text))
    assert sorted(row["key"] for row in report["keys"]) == sorted(file)
    recipe = flattened(yaml.safe_load(found.text))
    for row in report["keys"]:
        assert row["why"] != UNTRACED, row["key"]
        if row["state"] == "not imported":
            assert row["why"] and row["harm"] in HARMS, row
        elif row["state"] == "off":
            assert file[row["key"]] in (None, False, "", "none", "no", [], {}), row
        else:  # the keys that it became are in the recipe, or are its defaults
            written = [key for key in recipe for into in row["into"] if key.startswith(into)]
            assert written or {part.partition("[")[0] for part in row["key"].split(".")} & set(SAYS_A_DEFAULT), row
    named = {line.split(" -> ")[0] for line in report["translated"]} | set(report["off"])
    named |= {row["key"] for row in report["left"]}
    shown = [key for key in file if any(key == name or key.startswith((f"{name}.", f"{name}[")) for name in named)]
    assert sorted(shown) == sorted(file)


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
    check_accounts(found, Path("tool.yml").read_text())
    reasons = {name: item.why for item in found.left for name in (item.key, item.ours) if name}
    for key, words in case.get("left", {}).items():
        assert words in reasons[key]
    harms = {item.key: item.harm for item in found.left}
    for key, words in case.get("harms", {}).items():
        assert words in harms[key], key
    assert [item.harm for item in found.left] == sorted((item.harm for item in found.left), key=HARMS.index)
    assert case.get("says", "") in found.text
    assert "silent" not in case or case["silent"] not in found.text
    assert not [name for name in case.get("without", ()) if f"  {name}: " in found.text.rpartition("\n# ")[2]]


def test_the_cases_are_many_and_of_every_tool():
    assert len(CASES) >= 60 and len({case["name"] for case in CASES}) == len(CASES)
    assert all(sum(tool in case for case in CASES) >= 15 for tool in BASES)


def test_a_key_that_no_converter_reads_is_loud_and_an_empty_one_is_not(tmp_path):
    file = tmp_path / "tool.yml"
    file.write_text("base_model: a/b\nsequence_len: 9\nadapter:\nlora_r: 0\nfsdp_config: {}\nplugins: [x]\n")
    document = read_document(file)
    found = Import(peer_of(document), document, tmp_path)  # before any conversion
    assert [(item.key, item.why, item.harm) for item in found.left] == [
        (key, UNTRACED, "changes what is trained") for key in ("base_model", "sequence_len", "plugins")
    ]
    assert found.off == ["adapter", "lora_r", "fsdp_config"]


SMALL = "base_model: a/b\nsequence_len: 9\ndatasets: [{path: x/y}]\n"
# (file, words of the one sentence)
BAD_FILES = [
    ("", "is empty"),
    ("# nothing\n", "is empty"),
    ("- base_model: a\n", "is a mapping"),
    ("base_model\n", "is a mapping"),
    ("a: 1\n---\nb: 2\n", "expected a single document"),
    ("base_model: !!python/object/apply:os.system [ls]\n", "cannot hold"),
    ("base_model: !!binary aGk=\n", "cannot hold"),
    ("base_model: a\x07b\n", "U+0007 is not allowed"),
    ("base_model: " + "[" * 5000, "nested too deeply"),
    ("base_model: &a [*a]\n", "contains itself"),
    ("base_model: a\nx: {" + ", ".join(f"k{i}: 1" for i in range(11_000)) + "}\n", "more than 10,000"),
    (f"{SMALL}micro_batch_size: 99999999999999999\n", "at most 15 digits"),
    (f"{SMALL}output_dir: one\noutput_dir: two\n", "given twice, at lines 4 and 5"),
    (f"{SMALL}lora: {{r: 1, r: 2}}\n", "lora.r is given twice"),
    ("base_model: a\n\tsequence_len: 1\n", "does not allow a tab"),
    (f"{SMALL}? [a]\n: 1\n", "single scalar"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words"), BAD_FILES, ids=[words for _, words in BAD_FILES])
def test_a_bad_file_ends_in_one_sentence(text, words, tmp_path):
    file = tmp_path / "tool.yml"
    file.write_text(text)
    with pytest.raises(UserError) as refused:
        import_recipe(file)
    assert words in refused.value.message and "\n" not in refused.value.message and refused.value.exit_code == 2


# values of other types for keys that converters read
ODD = ["3", "-1", "x", ".nan", "true", "[1]", "[[1]]", "{a: {b: 1}}", "[{a: 1}, 2]", '"\\e[2J\\n"']
READ_BY_CONVERTERS = """
    adapter load_in_4bit rl datasets test_datasets pretraining_dataset chat_template special_tokens unfrozen_parameters
    lora_target_modules peft_layers_to_transform lr_groups embedding_lr lora_modules_to_save saves_per_epoch
    evals_per_epoch num_epochs val_set_size fsdp fsdp_config fsdp_version deepspeed wandb_name plugins optim_args
    gradient_checkpointing activation_offloading bf16 warmup_steps lr_scheduler loss_type dataset_mixture dataset_mixer
    dataset_splits model_init_kwargs liger_kernel_config report_to stage finetuning_type freeze_trainable_layers
    dataset dataset_dir max_samples template pissa_iter pissa_init neat_packing packing mask_history quantization_bit
    pref_loss peft_config dist_config train_dataset lr_scheduler_kwargs loss_weights eval_strategy dataset_name
    train_sampling_strategy tokenized_path data model train task context_parallel_size
""".split()  # noqa: SIM905


@pytest.mark.parametrize("odd", ODD)
def test_no_value_of_a_key_ends_in_a_traceback_and_every_key_is_accounted_for(odd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tools = list(BASES)
    # every second key with one value, and the others with the next one
    for number, key in enumerate(READ_BY_CONVERTERS[ODD.index(odd) % 2 :: 2], start=ODD.index(odd)):
        tool = tools[number % len(tools)]  # each key in files of all tools, with other values
        lines = {**BASES[tool], key: odd}
        Path("tool.yml").write_text("".join(f"{name}: {value}\n" for name, value in lines.items()))
        try:
            found = import_recipe(Path("tool.yml"))
        except UserError as refused:
            assert "\x1b" not in str(refused)
            continue
        assert yaml.safe_load(found.text), (tool, key)
        assert "\x1b" not in found.text
        states = [row["state"] for row in found.as_dict()["keys"]]
        assert states and set(states) <= {"imported", "not imported", "off"}


def test_a_key_of_the_file_cannot_end_the_comment_that_names_it(tmp_path):
    file = tmp_path / "tool.yml"
    file.write_text(SMALL + '"k\\nmodel: {trust_remote_code: true}\\e[2J": 1\n')
    found = import_recipe(file)
    assert "\x1b" not in found.text and "trust_remote_code" not in str(yaml.safe_load(found.text))
    assert [item.key for item in found.left] == ["k␊model: {trust_remote_code: true}␛[2J"]


def test_json_holds_every_key_with_its_fate(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tool.yml").write_text(SMALL + "lora_r: 0\nunk_token: 2\nmicro_batch_size: 3\nplugins: [a]\ntf32: false\n")
    report = json.loads(CliRunner().invoke(app, ["recipe", "import", "tool.yml", "--json"]).stdout)
    rows = {row["key"]: row for row in report["keys"]}
    assert list(rows) == ["base_model", "sequence_len", "datasets[0].path", "lora_r", "unk_token", "micro_batch_size",
                          "plugins", "tf32"]  # fmt: skip
    assert rows["micro_batch_size"]["into"] == ["train.per_device_train_batch_size"]
    assert (rows["unk_token"]["line"], rows["unk_token"]["harm"]) == (5, "changes what is trained")
    assert (rows["plugins"]["harm"], rows["tf32"]["state"]) == ("has no effect here", "off")
    assert [item["key"] for item in report["left"]] == ["lora_r", "unk_token", "plugins"]


def test_every_template_of_another_tool_is_a_built_in_one():
    assert set(TEMPLATES.values()) <= set(BUILT_IN)


def test_no_key_that_has_a_counterpart_has_a_reason_why_it_has_none():
    counterparts = {leaf(key) for key in keys()} | {name for row in (*ALIASES, *IMPORTED) for name in row.names}
    # a template's text has none; ours rounds the embedding, and theirs pads the rows; ours are of `ligertune sample`,
    # and theirs of predictions and of methods that generate during training; load_in_4bit is ours of a draft head's
    # target, and theirs of the model that trains
    sampling = {"generation_batch_size", "max_new_tokens", "min_p", "top_p"}
    assert set(REASONS) & counterparts <= {"chat_template", "pad_to_multiple_of", "load_in_4bit"} | sampling


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
    loud = lines.index("NOT IMPORTED, changes what is trained (1 key):")
    assert lines[loud + 1].startswith('  axolotl.yml:3: lr_scheduler (train.lr_scheduler_type): "rex"')
    assert lines[-1] == "Run it: ligertune train new.yaml"
