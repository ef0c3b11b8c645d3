"""`ligertune init` and `ligertune recipe`: check, show, schema, keys and list; completions."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ligertune.cli.app import app
from ligertune.errors import UserError
from ligertune.models.read_config import read_config
from ligertune.planning.options import ModelOptions
from ligertune.recipe import load_recipe, recipe_schema
from ligertune.recipe.describe import matching_keys, recipe_reference, run_folder
from ligertune.recipe.document import keys
from ligertune.recipe.read import bundled_recipes, recipe_title

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "configs" / "recipe_keys.md"
NAMED = [key for key, entry in keys().items() if key and not key.endswith("[]")]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(*arguments): the command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, arguments)


@pytest.fixture
def init(run):
    return lambda *arguments: run("init", *arguments)


def test_init_writes_a_recipe_with_the_defaults(init):
    done = init("some/model", "some/data")
    assert done.exit_code == 0 and "ligertune data recipe.yaml" in done.output.replace("-m ", "")
    written = load_recipe(Path("recipe.yaml"))
    Path("bare.yaml").write_text(
        "model: {model_name_or_path: some/model}\ndata: {datasets: [{path: some/data}]}\n"
        f"checkpoint: {{output_dir: {written.checkpoint.output_dir}}}\n"
    )
    assert written == load_recipe(Path("bare.yaml"))


def test_init_describes_every_key_and_commented_keys_are_valid(init):
    """Removing one # gives a recipe with the same values."""
    init("some/model", "some/data")
    lines = Path("recipe.yaml").read_text().splitlines()
    # init writes no group, and no function
    written = [key for key in NAMED if not key.startswith(("train.lr_groups[]", "sample.score[]"))]
    assert not [key for key in written if not any(keys()[key]["description"] in line for line in lines)]
    commented = [i for i, line in enumerate(lines) if line.lstrip().startswith("# ") and ":" in line][2:]
    assert len(commented) > 30
    expected = load_recipe(Path("recipe.yaml"))
    comments = {j for j, line in enumerate(lines) if line.lstrip().startswith("#")}
    for i in commented:  # without the other comments, which take most of the time to parse
        kept = [(j, line) for j, line in enumerate(lines) if j == i or j not in comments]
        text = "\n".join(line.replace("# ", "", 1) if j == i else line for j, line in kept)
        Path("one.yaml").write_text(text)
        assert load_recipe(Path("one.yaml")) == expected, lines[i]


def test_init_applies_overrides_aliases_and_rivals(init):
    Path("one.jsonl").write_text("")
    assert init("some/model", "one.jsonl", "some/data", "--set", "lr=1e-3", "--set", "train.max_steps=7",
                "--set", "data.datasets.1.weight=0.5", "--out", "r.yaml").exit_code == 0  # fmt: skip
    recipe = load_recipe(Path("r.yaml"))
    assert (recipe.train.learning_rate, recipe.train.max_steps, recipe.train.num_train_epochs) == (1e-3, 7, None)
    assert recipe.data.datasets[1].weight == 0.5
    assert "path: one.jsonl" in Path("r.yaml").read_text()  # as typed, not as an absolute path


def test_init_writes_the_learning_rate_of_adapters(init):
    done = init("some/model", "some/data", "--set", "method.type=lora")
    assert "train.learning_rate is 0.0002 for an adapter" in done.output
    assert load_recipe(Path("recipe.yaml")).train.learning_rate == 2e-4
    done = init("some/model", "some/data", "--set", "method.type=lora", "--set", "lr=2e-5", "--out", "given.yaml")
    assert "for an adapter" not in done.output
    assert load_recipe(Path("given.yaml")).train.learning_rate == 2e-5


def test_init_writes_lists_and_mappings_that_load_again(init):
    given = {"logging.report_to": "[tensorboard]", "method.type": "freeze", "method.trainable": "[a, 'b: c']",
             "eval.sample_prompts": "[]", "data.datasets.0.columns": "{prompt: question}",
             "data.eval_datasets": "[{path: other/data}]"}  # fmt: skip
    done = init("some/model", "some/data", *(f"--set={key}={value}" for key, value in given.items()))
    assert done.exit_code == 0, done.output
    written = load_recipe(Path("recipe.yaml"))
    assert written.logging.report_to == ("tensorboard",) and written.method.trainable == ("a", "b: c")
    assert written.eval.sample_prompts == () and written.data.eval_datasets[0].path == "other/data"
    assert written.data.datasets[0].columns == {"prompt": "question"}
    for value, expected in (("wandb", ("wandb",)), ("none", ()), ("[]", ())):  # as TrainingArguments reads it
        assert load_recipe(Path("recipe.yaml"), [f"logging.report_to={value}"]).logging.report_to == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["some/model", "some/data", "--set", "train.learning_rat=1"], "train.learning_rate"),
        (["some/model", "some/data", "--set", "logging.report_to=comet"], "swanlab or comet_ml"),
        (["./nowhere", "some/data"], "no folder ./nowhere"),
        (["some/model", "nowhere.jsonl"], "no file or folder nowhere.jsonl"),
        (["some/model", "some/data", "--out", "held.yaml"], "held.yaml exists already"),
        (["some/model", "some/data", "--out", "no/folder.yaml"], "cannot be written"),
    ],
)
def test_init_refuses_invalid_input_and_writes_nothing(init, arguments, words):
    Path("held.yaml").write_text("mine")
    done = init(*arguments)
    assert isinstance(done.exception, UserError) and done.exception.exit_code == 2 and words in str(done.exception)
    assert Path("held.yaml").read_text() == "mine" and not Path("recipe.yaml").exists()


PAIRS = '{"prompt": "q", "chosen": "a", "rejected": "b"}\n' * 3
# (name of the file, its text, values of the recipe, words of its comment); truth by hand
DATA = [
    ("pairs.jsonl", PAIRS, {"task": "dpo", "preference.loss_type": "sigmoid"}, "the columns chosen and rejected"),
    ("turns.json", json.dumps([{side: [{"role": "user", "content": "q"}, {"role": "assistant", "content": side}]
                                for side in ("chosen", "rejected")}] * 3), {"task": "dpo"}, "pairs"),
    ("stack.jsonl", '{"question": "q", "response_j": "a", "response_k": "b"}\n',
     {"task": "dpo", "data.datasets.0.columns": {"chosen": "response_j", "rejected": "response_k"}}, "response_j"),
    ("inputs.jsonl", '{"input": "q", "chosen": "a", "rejected": "b"}\n',
     {"task": "dpo", "data.datasets.0.columns": {"question": "input"}}, "pairs"),
    ("kto.jsonl", "".join(f'{{"prompt": "q", "completion": "a", "label": {vote}}}\n' for vote in ("true", "false")),
     {"task": "dpo", "preference.loss_type": "kto"}, "a column label that says which are good"),
    ("thumbs.jsonl", "".join(f'{{"instruction": "q", "output": "a", "thumbs_up": {vote}}}\n' for vote in (1, 0)),
     {"preference.loss_type": "kto", "data.datasets.0.columns": {"label": "thumbs_up"}}, "thumbs_up"),
    ("spam.csv", "text,label\nbuy,spam\nhello,ham\nbye,ham\n",
     {"task": "classification", "classification.problem_type": "single_label_classification"}, "a text (text)"),
    ("reviews.csv", "id,review,sentiment\n1,good,pos\n2,bad,neg\n3,fine,pos\n4,no,neg\n",
     {"task": "classification", "data.datasets.0.columns": {"label": "sentiment"}}, "a label (sentiment)"),
    ("scores.csv", "body,label\none,0.5\ntwo,1.5\n",
     {"classification.problem_type": "regression", "data.datasets.0.columns": {"text": "body"}}, "a text (body)"),
    ("tags.jsonl", '{"text": "a", "labels": ["x", "y"]}\n{"text": "b", "labels": ["x"]}\n',
     {"classification.problem_type": "multi_label_classification"}, "a label (labels)"),
    ("facts.jsonl", '{"text": "a", "label": true}\n{"text": "b", "label": false}\n',
     {"task": "classification", "classification.problem_type": "single_label_classification"}, "a label (label)"),
    ("nli.jsonl", '{"premise": "a", "hypothesis": "b", "label": 2}\n', {"task": "classification"},
     "premise and hypothesis"),
    ("tickets.jsonl", '{"messages": [{"role": "user", "content": "q"}], "label": "billing"}\n',
     {"task": "classification"}, "a conversation"),
    ("steps.jsonl", '{"prompt": "q", "completions": ["a", "b"], "labels": [true, false]}\n', {"task": "sft"}, ""),
    ("alpaca.jsonl", '{"instruction": "q", "input": "", "output": "a", "category": "x"}\n' * 9, {"task": "sft"}, ""),
    ("tickets.csv", "id,ticket,category\n1,lost,post\n2,late,post\n3,dear,bill\n4,twice,bill\n",
     {"task": "classification", "data.datasets.0.columns": {"label": "category", "text": "ticket"}}, "a text (ticket)"),
    ("two.csv", "ticket,answer_to,category\na,b,post\nc,d,post\ne,f,bill\ng,h,bill\n", {"task": "sft"}, ""),
    ("graded.jsonl", '{"question": "q", "answer": "a", "label": "easy"}\n', {"task": "sft"}, ""),
    ("words.jsonl", '{"text": "a"}\n{"text": "b"}\n', {"task": "sft"}, ""),
    ("articles.jsonl", "".join(f'{{"text": "{i}", "score": {i}}}\n' for i in range(30)), {"task": "sft"}, ""),
    ("empty.jsonl", "", {"task": "sft"}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "expected", "words"), DATA, ids=[row[0] for row in DATA])
def test_init_writes_the_task_that_fits_the_data_and_why(init, name, text, expected, words):
    Path(name).write_text(text)
    done = init("some/model", name)
    assert done.exit_code == 0, done.exception
    written = load_recipe(Path("recipe.yaml")).model_dump()
    for key, value in expected.items():
        found = written
        for part in key.split("."):
            found = found[int(part) if part.isdecimal() else part]
        assert found == value, key
    lines = Path("recipe.yaml").read_text().splitlines()
    comments = [line for line in lines if line.startswith("# task: ") and ", because " in line]
    assert (words in comments[0] and comments[0][2:] in done.output) if words else not comments


def test_init_keeps_a_task_that_the_user_names_and_refuses_data_of_two_tasks(init):
    Path("pairs.jsonl").write_text(PAIRS)
    Path("spam.csv").write_text("text,label\nbuy,spam\nhello,ham\n")
    assert init("some/model", "pairs.jsonl", "--set", "task=reward").exit_code == 0
    assert load_recipe(Path("recipe.yaml")).task == "reward"
    refused = init("some/model", "pairs.jsonl", "spam.csv", "--out", "two.yaml").exception
    assert isinstance(refused, UserError) and "pairs.jsonl is data of task: dpo" in str(refused)
    assert not Path("two.yaml").exists()


def test_init_writes_the_learning_rate_of_preference_pairs(init):
    Path("pairs.jsonl").write_text(PAIRS)
    for method, rate in (("full", 5e-7), ("lora", 5e-6)):
        init("some/model", "pairs.jsonl", "--set", f"method.type={method}", "--out", f"{method}.yaml")
        assert load_recipe(Path(f"{method}.yaml")).train.learning_rate == rate


@pytest.mark.parametrize(
    ("config", "overrides", "expected"),
    [
        ({"max_position_embeddings": 512}, (), 512),
        ({"n_positions": 1024}, (), 1024),
        ({"text_config": {"max_position_embeddings": 512}}, (), 512),
        ({"max_position_embeddings": 131072}, (), 2048),
        ({"max_position_embeddings": 512}, ("data.max_length=256",), 256),
        ({"max_position_embeddings": 512}, ("model.rope_parameters.factor=8",), 2048),
        ({"max_position_embeddings": "many"}, (), 2048),
    ],
)
def test_init_writes_no_longer_examples_than_the_model_reads(init, config, overrides, expected):
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(config))
    options = [part for override in overrides for part in ("--set", override)]
    done = init("model", "some/data", *options)
    assert load_recipe(Path("recipe.yaml")).data.max_length == expected
    assert ("the context of the model" in done.output) == (expected in (512, 1024))


def test_the_folder_of_a_run_is_no_model_and_the_message_names_the_one_in_it(init):
    Path("runs/first/model").mkdir(parents=True)
    Path("runs/first/model/config.json").write_text("{}")
    refused = init("runs/first", "some/data").exception
    assert isinstance(refused, UserError) and str(refused).endswith("runs/first/model")


def test_the_folder_of_a_run_with_an_adapter_says_how_to_make_a_model_of_it(init):
    Path("runs/first/model").mkdir(parents=True)
    Path("runs/first/model/adapter_config.json").write_text("{}")
    refused = init("runs/first", "some/data").exception
    assert isinstance(refused, UserError) and "ligertune export" in str(refused) and refused.exit_code == 2
    with pytest.raises(UserError, match="holds an adapter, and no whole model"):
        read_config(ModelOptions(model_name_or_path="runs/first/model"))


def test_a_second_init_names_overwrite_which_replaces_a_file_and_never_the_target_of_a_link(init):
    assert init("some/model", "some/data").exit_code == 0
    refused = init("other/model", "some/data").exception
    assert isinstance(refused, UserError) and "--overwrite" in str(refused)
    assert load_recipe(Path("recipe.yaml")).model.model_name_or_path == "some/model"
    assert init("other/model", "some/data", "--overwrite").exit_code == 0
    assert load_recipe(Path("recipe.yaml")).model.model_name_or_path == "other/model"
    Path("mine.txt").write_text("mine")
    Path("link.yaml").symlink_to("mine.txt")
    assert init("some/model", "some/data", "--out", "link.yaml", "--overwrite").exit_code == 0
    assert Path("mine.txt").read_text() == "mine" and not Path("link.yaml").is_symlink()
    Path("rows.jsonl").write_text(PAIRS)
    Path("folder").mkdir()
    for out in ("rows.jsonl", "folder", "no/recipe.yaml"):
        refused = init("some/model", "rows.jsonl", "--out", out, "--overwrite").exception
        assert isinstance(refused, UserError) and refused.exit_code == 2, out
    assert Path("rows.jsonl").read_text() == PAIRS


@pytest.mark.parametrize(
    ("model", "data", "name"),
    [
        ("Qwen/Qwen2.5-0.5B", "tatsu-lab/alpaca", "runs/qwen2.5-0.5b-alpaca"),
        ("models/mine/", "data/answers.jsonl.gz", "runs/mine-answers"),
        ("a/b", "parts/*.parquet", "runs/b"),
        ("a/b", "notes.md", "runs/b-notes"),
        ("runs/First/model", "pairs.jsonl", "runs/first-pairs"),
    ],
)
def test_the_run_folder_is_named_after_model_and_data(model, data, name):
    assert run_folder(model, data) == name


def test_the_key_reference_is_complete_and_current():
    text = recipe_reference()
    assert REFERENCE.read_text(encoding="utf-8") == text  # ligertune recipe keys > configs/recipe_keys.md
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == len([key for key in NAMED if "properties" not in keys()[key]])
    assert "| `train.learning_rate` | Peak learning rate. | a number (above 0, at most 1) | `2.0e-05` |" in rows
    assert any(row.startswith("| `data.datasets[].path` |") and row.endswith("| (required) |") for row in rows)


def test_keys_are_completed():
    assert matching_keys("train.lear") == ["train.learning_rate="]
    assert "data.datasets.0.path=" in matching_keys("data.datasets.0")
    assert not matching_keys("nothing")


@pytest.mark.parametrize("path", bundled_recipes(), ids=lambda path: path.stem)
def test_every_bundled_recipe_loads_without_notices_and_has_a_title(path):
    assert load_recipe(path).notices == ()
    assert recipe_title(path)


def test_check_show_and_schema_of_a_flat_file(run):
    Path("flat.yaml").write_text("base_model: some/model\ndataset: some/data\noutput_dir: runs/one\n")
    wrong = run("recipe", "check", "flat.yaml", "--set", "train.sede=1").exception
    assert isinstance(wrong, UserError) and "--set train.sede=1: train.sede is not a recipe key" in str(wrong)
    lines = run("recipe", "check", "flat.yaml").stdout.splitlines()
    assert lines[0] == "flat.yaml:1: base_model is read as model.model_name_or_path."
    assert len(lines) == 4 and lines[3] == "flat.yaml: OK"
    done = run("recipe", "check", "flat.yaml", "--json")
    report = json.loads(done.stdout)
    assert "flat.yaml: OK" in done.stderr and report["ok"] is True and len(report["notices"]) == 3
    shown = run("recipe", "show", "flat.yaml", "--set", "train.max_steps=5").stdout
    Path("again.yaml").write_text(shown)
    assert "max_steps: 5\n" in shown and shown.startswith("# ")
    assert run("recipe", "show", "again.yaml").stdout == shown[shown.index("version:") :]
    assert json.loads(run("recipe", "show", "again.yaml", "--json").stdout)["train"]["max_steps"] == 5
    assert json.loads(run("recipe", "schema").stdout) == recipe_schema()


def test_the_quickstart_is_first_in_the_list(run):
    first = next(iter(json.loads(run("recipe", "list", "--json").stdout)))
    assert first.endswith("stories260k.yaml") and Path(first).is_file()
