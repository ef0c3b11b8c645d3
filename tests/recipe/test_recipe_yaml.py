"""Reading of values: YAML 1.2, spellings of switches, overrides and paths."""

import pytest

from ligertune.errors import UserError
from ligertune.recipe import load_recipe

# override -> value
READ = {
    "train.learning_rate=1e-4": 1e-4,  # a string in YAML 1.1, which requires a dot
    "train.learning_rate=1E-4": 1e-4,
    "train.learning_rate=.5": 0.5,
    "train.learning_rate=1": 1.0,
    "train.max_steps=1e3": 1000,
    "train.max_steps=1_000": 1000,
    "train.seed=0042": 42,  # 34 in YAML 1.1
    "eval.eval_strategy=no": "no",  # false in YAML 1.1
    "eval.eval_strategy=off": "no",
    "eval.eval_strategy=false": "no",
    "eval.eval_strategy='no'": "no",
    "checkpoint.save_strategy=no": "no",
    "checkpoint.resume_from_checkpoint=no": "never",
    "checkpoint.resume_from_checkpoint=true": "auto",
    "kernels.enabled=auto": "auto",
    "kernels.enabled=true": True,
    "kernels.enabled=off": False,
    "kernels.rope=no": False,
    "train.gradient_checkpointing=on": True,
    "model.tokenizer.pad_token=no": "no",
    "model.revision=1:30": "1:30",  # 90 in YAML 1.1
    "model.revision=2024-01-01": "2024-01-01",  # a date in YAML 1.1
    "model.revision='1e5'": "1e5",
    "data.system_prompt=": None,
    'data.system_prompt="a: b # c"': "a: b # c",
    "data.datasets[0].columns={yes: no, 1: x}": {"yes": "no", "1": "x"},
}


@pytest.mark.parametrize("override", READ)
def test_a_value_is_read_as_yaml_1_2(override, required, load):
    value = load(required, override)
    for part in override.partition("=")[0].replace("[0]", ".0").split("."):
        value = value[int(part)] if part.isdecimal() else getattr(value, part)
    assert value == READ[override] and type(value) is type(READ[override])


def test_an_empty_section_has_the_defaults(required, load):
    assert load(required + "train:\nkernels:\n") == load(required)


def test_anchors_and_byte_order_marks_are_read(load, required):
    text = "\ufeff" + required + "eval: {eval_steps: &steps 7}\nlogging: {logging_steps: *steps}\n"
    assert load(text).logging.logging_steps == 7


def test_overrides_replace_values_and_create_sections(load):
    recipe = load("train: {seed: 1}\n", "model.model_name_or_path=m", "train.seed=2", "data.datasets.0.path=a",
                  "data.datasets[1]={path: b, split: test}", "checkpoint.output_dir=o", "train.seed=3")  # fmt: skip
    assert recipe.train.seed == 3
    assert [(item.path, item.split) for item in recipe.data.datasets] == [("a", "train"), ("b", "test")]


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("train.lr_=1", "train.lr_ is not a recipe key. Did you mean train.learning_rate?"),
        ("model.rope_parameters.type=yarn",
         "model.rope_parameters.type is not a recipe key. Did you mean model.rope_parameters.rope_type?"),
        ("learning_rate=1", "`learning_rate` belongs under `train`, not at the top level."),
        ("train.seed=x", 'train.seed is "x" (a string); it must be an integer (at least 0, below 4294967296).'),
        ("train.seed", "write it as section.key=value."),
        ("=1", "write it as section.key=value."),
        ("train.seed=[1", "not YAML at column 3: while parsing a flow sequence, expected ',' or ']', "
                          "but got '<stream end>'."),
        ("data.datasets[4].path=x", "this recipe has no place for data.datasets[4].path."),
        ("data.datasets.first.path=x", "this recipe has no place for data.datasets.first.path."),
        ("train.seed.x=1", "this recipe has no place for train.seed.x."),
        ("train={seed: 1, seed: 2}", "train.seed is given twice."),
    ],
)  # fmt: skip
def test_a_complaint_about_an_override_names_it(override, complaint, required, complaints):
    assert complaints(required + "train: {seed: 4}\n", override) == [f"--set {override}: {complaint}"]


def test_an_override_removes_the_rival_key_of_the_file(load, required):
    recipe = load(required + "train:\n  num_train_epochs: 3\n", "train.max_steps=5")
    assert (recipe.train.max_steps, recipe.train.num_train_epochs) == (5, None)
    assert recipe.notices == ("--set train.max_steps=5: replaces train.num_train_epochs (line 5).",)
    text = "base_model: m\ndataset: d\ncheckpoint: {output_dir: o, overwrite: true}\n"
    recipe = load(text, "checkpoint.resume_from_checkpoint=auto")
    assert (recipe.checkpoint.overwrite, recipe.checkpoint.resume_from_checkpoint) == (False, "auto")


def test_contradictory_overrides_are_refused(complaints, required):
    assert complaints(required, "train.max_steps=5", "train.num_train_epochs=2") == [
        "--set train.max_steps=5: train.max_steps and train.num_train_epochs (--set train.num_train_epochs=2) "
        "are both given. Keep one of them."
    ]


def test_existing_paths_become_absolute_and_others_are_unchanged(tmp_path, monkeypatch, required):
    recipes, elsewhere = tmp_path / "recipes", tmp_path / "elsewhere"
    for path in ("some/model/config.json", "data/a.jsonl", "prompt.jinja", "chat/x"):
        (recipes / path).parent.mkdir(parents=True, exist_ok=True)
        (recipes / path).touch()
    (elsewhere / "here").mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    (recipes / "recipe.yaml").write_text(required)
    overrides = [
        "data.datasets=[{path: data/a.jsonl}, {path: data/*.jsonl}, {path: here}, {path: no/such}, {path: ../*.csv}]",
        "data.prompt_template=prompt.jinja",
        "model.tokenizer.chat_template=chat",
    ]
    recipe = load_recipe(recipes / "recipe.yaml", overrides)
    assert recipe.model.model_name_or_path == str(recipes / "some/model")
    assert [item.path for item in recipe.data.datasets] == [
        *(str(path) for path in (recipes / "data/a.jsonl", recipes / "data/*.jsonl", elsewhere / "here")),
        *("no/such", "../*.csv"),
    ]
    assert recipe.data.prompt_template == str(recipes / "prompt.jinja")
    assert recipe.model.tokenizer.chat_template == "chat"  # a built-in name; a folder is not a template
    assert recipe.checkpoint.output_dir == "runs/one"
    assert recipe.source == recipes / "recipe.yaml"


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.CSV", "rows.txt"])
def test_a_data_file_in_place_of_a_recipe_is_told_from_one(name, tmp_path):
    (tmp_path / name).write_text('{"instruction": "a", "output": "b"}\n' * 2)
    with pytest.raises(UserError, match=rf"no recipe\. Write .*ligertune init MODEL .*{name}"):
        load_recipe(tmp_path / name)


def test_the_home_folder_is_expanded(monkeypatch, tmp_path, required, load):
    monkeypatch.setenv("HOME", str(tmp_path))
    recipe = load(required, "checkpoint.output_dir=~/runs", "data.datasets[0].path=~/no/such")
    assert recipe.checkpoint.output_dir == f"{tmp_path}/runs"
    assert recipe.data.datasets[0].path == f"{tmp_path}/no/such"
