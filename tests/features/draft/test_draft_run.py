"""`ligertune draft` on the tiny bundled model: a head that learns, resumed runs, files, and bad input."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.command_line import losses, overrides, run_here
from support.tasks.draft_runs import DRAFT, evaluations, plan_draft, train_draft

from ligertune.errors import UserError
from ligertune.features.draft.decode import measure_run
from ligertune.features.draft.files.draft_files import read_draft_files
from ligertune.features.draft.training import draft_run
from ligertune.features.draft.training.draft_task import AcceptanceMeasures, accepted_length
from ligertune.models.read_config import read_config
from ligertune.planning.options import RunOptions
from ligertune.recipe import load_recipe

SHORT = {
    "train.max_steps": 4,
    "train.per_device_train_batch_size": 2,
    "logging.logging_steps": 1,
    "data.datasets.0.max_samples": 40,
    "data.max_length": 128,
    "checkpoint.save_strategy": "no",
}


def train_and_measure(folder: Path, *, steps: int, rows: int) -> dict:
    """Train a head, with an evaluation before the first and after the last step; return the report."""
    settings = {"train.max_steps": steps, "train.learning_rate": 1e-2, "data.max_length": 128, "data.val_split": 0.02}
    settings |= {"data.datasets.0.max_samples": rows, "eval.eval_on_start": True, "eval.eval_steps": steps}
    return train_draft(folder, **settings)[1]


def alphas_of(evaluation: dict) -> list[float]:
    return [evaluation[f"eval_alpha_{step}"] for step in range(1, 5)]


@pytest.mark.slow
def test_a_head_learns_to_draft_what_its_model_wrote(tmp_path) -> None:
    """From no accepted draft to about one in three steps, in 50 short steps."""
    train_and_measure(tmp_path / "run", steps=50, rows=400)
    before, after = evaluations(tmp_path / "run")
    assert before["eval_accepted_length"] < 1.1
    assert after["eval_accepted_length"] > 1.3
    assert alphas_of(after) == sorted(alphas_of(after), reverse=True)  # further ahead is harder


def test_report_page_and_cards_have_the_acceptance_before_and_after_training(tmp_path) -> None:
    report = train_and_measure(tmp_path / "run", steps=6, rows=100)
    before, after = evaluations(tmp_path / "run")
    assert (
        before["eval_accepted_length"]
        < after["eval_accepted_length"]
        == pytest.approx(accepted_length(alphas_of(after)[:3]))
    )
    assert report["model_path"] == str(tmp_path / "run" / "draft")

    found = report["draft"]
    assert found["before"]["accepted_length"] == before["eval_accepted_length"]
    assert (found["after"]["step"], found["after"]["alphas"]) == (6, alphas_of(after))
    assert (found["steps"], found["drafts"]) == (6, 3)
    assert found["coverage"] == 1.0  # all tokens can be drafted
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    for one in (before, after):
        values = [f"{alpha:.1%}" for alpha in alphas_of(one)]
        cells = "</td><td>".join([*values, f"{one['eval_accepted_length']:.2f}"])
        assert f"{cells}</td></tr>" in page
    assert "<th>accepted length of 3 drafts</th>" in page
    for layout in ("eagle3", "speculators"):
        card = (tmp_path / "run" / "draft" / layout / "README.md").read_text()
        assert "| Trained on | stories.jsonl.gz |" in card and "| Training steps | 6 |" in card
        assert f"| Training examples | {found['examples']:,} |" in card
        assert f"| {', '.join(f'{alpha:.1%}' for alpha in alphas_of(after))} |" in card
        accepted = f"{after['eval_accepted_length']:.2f} with 3 drafts; before training"
        assert f"{accepted} {before['eval_accepted_length']:.2f}" in card


@pytest.mark.slow
def test_the_bundled_recipe_reaches_an_accepted_length_of_1_8(tmp_path) -> None:
    train_draft(tmp_path / "run", **{"eval.eval_on_start": True})
    before, *_, after = evaluations(tmp_path / "run")
    assert before["eval_accepted_length"] < 1.1
    assert after["eval_accepted_length"] >= 1.8
    trained = measured_chains(tmp_path / "run")
    assert trained["chain"]["accepted_length"] >= 1.8  # greedily, with 3 drafts
    assert trained["sampled chain"]["accepted_length"] >= 1.8
    train_draft(tmp_path / "one", **{"train.max_steps": 1, "train.learning_rate": 1e-9, "eval.eval_strategy": "no"})
    assert measured_chains(tmp_path / "one")["chain"]["accepted_length"] < 1.1


def measured_chains(folder: Path) -> dict:
    """Decode held-out prompts with the head of a run."""
    recipe = load_recipe(DRAFT, overrides=[f"checkpoint.output_dir={folder}"])
    return measure_run.measure_run(RunOptions.of(recipe))


def test_the_command_writes_a_head_that_belongs_to_the_model(tmp_path) -> None:
    settings = {**SHORT, "draft.draft_vocab_size": 300}
    done = run_here(
        "draft", DRAFT, "--json", *overrides({**settings, "checkpoint.output_dir": tmp_path / "run"}), cwd=tmp_path
    )
    assert done.code == 0, done.err[-3000:]
    report = json.loads(done.out)
    assert "README.md" in done.err and "accepted_length" in done.err
    note = next(note for note in report["notes"] if "draft vocabulary" in note)
    assert "300 of 512 tokens" in note
    assert f"covers {100 * report['draft']['coverage']:.2f} % of the trained tokens" in note
    config = read_config(load_recipe(DRAFT).model)
    files = read_draft_files(tmp_path / "run" / "draft" / "speculators", config)
    assert (files.layout, files.config.draft_vocab_size, files.config.layer_ids) == ("speculators", 300, (1, 2, 3))
    other = read_draft_files(tmp_path / "run" / "draft" / "eagle3", config)
    assert all(torch.equal(other.tensors[name], tensor) for name, tensor in files.tensors.items())
    assert files.tensors["fc.weight"].dtype is torch.float32

    # the written head is one to start from, and keeps its vocabulary
    again = {**settings, "draft.head_path": tmp_path / "run", "train.learning_rate": 1e-12}
    train_draft(tmp_path / "again", **again)
    continued = read_draft_files(tmp_path / "again" / "draft" / "eagle3", config)
    for name, tensor in files.tensors.items():
        torch.testing.assert_close(continued.tensors[name], tensor, rtol=0, atol=1e-9)
    with pytest.raises(UserError, match=r"draft\.num_layers: 2, but the head in"):
        train_draft(tmp_path / "other", **{**again, "draft.num_layers": 2})


def test_a_head_that_is_written_wrongly_ends_the_run(tmp_path, monkeypatch) -> None:
    write = draft_run.write_draft_head

    def write_and_damage(head, folder, target, **options) -> None:
        write(head, folder, target, **options)
        tensors = load_file(folder / "model.safetensors")
        tensors["fc.weight"][0, 0] += 1
        save_file(tensors, folder / "model.safetensors")

    monkeypatch.setattr(draft_run, "write_draft_head", write_and_damage)
    with pytest.raises(UserError, match=r"eagle3: fc\.weight is not that of the trained draft head"):
        train_draft(tmp_path / "run", **{**SHORT, "train.max_steps": 1, "eval.eval_strategy": "no"})


@pytest.mark.slow
def test_the_command_measures_the_head_of_a_run(tmp_path, monkeypatch) -> None:
    """A chain and a tree write the text of plain decoding; a sampled chain is accepted about as often as expected."""
    train_draft(tmp_path / "run", **{**SHORT, "train.max_steps": 12, "train.learning_rate": 1e-2})
    for name, few in (("PROMPTS", 2), ("NEW_TOKENS", 12), ("TEXTS", 4)):
        monkeypatch.setattr(measure_run, name, few)
    settings = overrides({**SHORT, "checkpoint.output_dir": tmp_path / "run"})
    done = run_here("draft", DRAFT, "--measure", "--json", *settings, cwd=tmp_path)
    assert done.code == 0, done.err[-3000:]
    assert "Accepted drafts, if those before are accepted" in done.err
    found = json.loads(done.out)
    assert list(found) == ["chain", "tree", "sampled chain"]
    for name in ("chain", "tree"):
        assert (found[name]["identical"], found[name]["prompts"], found[name]["near_ties"]) == (2, 2, 0)
    assert found["tree"]["tree_nodes"] > found["chain"]["tree_nodes"] == 4
    assert found["sampled chain"]["expected"][0] > 0.0
    empty = run_here("draft", DRAFT, "--measure", *overrides({"checkpoint.output_dir": tmp_path / "no"}), cwd=tmp_path)
    assert empty.code == 2
    assert "holds no draft head" in " ".join(empty.err.split())


def test_accumulated_and_resumed_runs_have_the_losses_of_one(tmp_path) -> None:
    base = {**SHORT, "train.per_device_train_batch_size": 4, "eval.eval_strategy": "no"}
    expected, _ = train_draft(tmp_path / "one", **base)
    halves = {"train.per_device_train_batch_size": 2, "train.gradient_accumulation_steps": 2}
    found, _ = train_draft(tmp_path / "halves", **{**base, **halves})
    assert found == pytest.approx(expected, rel=1e-5)
    saved = {"checkpoint.save_strategy": "steps", "checkpoint.save_steps": 2}
    train_draft(tmp_path / "run", **{**base, **saved})
    shutil.rmtree(tmp_path / "run" / "draft")  # a run without its head is not finished
    step = tmp_path / "run" / "checkpoints" / "step-2"
    train_draft(tmp_path / "run", **{**base, **saved, "checkpoint.resume_from_checkpoint": step})
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-6)


def test_the_best_head_is_that_with_the_highest_accepted_length(tmp_path) -> None:
    """With a loss that does not say it: the learning rate is so high that the last steps are worse."""
    settings = {**SHORT, "train.max_steps": 6, "eval.eval_steps": 1, "train.learning_rate": 0.05}
    settings |= {"checkpoint.load_best_model_at_end": True, "train.warmup_ratio": 0}
    _, report = train_draft(tmp_path / "run", **settings)
    found = evaluations(tmp_path / "run")
    best = max(found, key=lambda line: line["eval_accepted_length"])
    record = json.loads((tmp_path / "run" / "best" / "best.json").read_text())
    assert record["step"] == best["step"]
    words = f"the model is that of step {best['step']}, with the highest accepted_length"
    assert report["draft"]["after"]["step"] == best["step"]  # of the head that is written
    assert report["draft"]["before"] is None
    assert any(words in note for note in report["notes"])


def test_accepted_length_follows_from_the_mean_acceptance_of_each_step() -> None:
    measures = AcceptanceMeasures(steps=3, drafts=2)
    for name, accepted, count in (("alpha_1", 6.0, 8), ("alpha_2", 2.0, 4), ("alpha_3", 0.2, 1)):
        measures.add(name, torch.tensor(accepted), count)
    found = measures.means(measures.take())
    assert found["alpha_3"] == pytest.approx(0.2)
    assert found["accepted_length"] == pytest.approx(1 + 0.75 + 0.75 * 0.5)
    assert measures.means(measures.take()) == {}


def test_the_plan_warns_of_texts_that_the_model_may_not_have_written(tmp_path) -> None:
    model = load_recipe(DRAFT).model.model_name_or_path
    stories = load_recipe(DRAFT).data.datasets[0].path
    unknown = "it is not known whether the model wrote"
    assert any(unknown in note for note in plan_draft(tmp_path / "run", **SHORT).plan.notes)
    folder = tmp_path / "answers"
    folder.mkdir()
    shutil.copy(stories, folder)
    settings = {**SHORT, "data.datasets.0.path": folder / Path(stories).name}
    for source, is_known in ((model, True), (str(Path(model).parent), True), ("another/model", False)):
        (folder / "sample.json").write_text(json.dumps({"source": source}))
        notes = plan_draft(tmp_path / "run", **settings).plan.notes
        assert any(unknown in note for note in notes) is not is_known


@pytest.mark.parametrize(
    "words, settings",
    [
        ("draft.steps is 0", {"draft.steps": 0}),
        ("data.max_length is 5, too short for 4 steps", {"data.max_length": 5}),
        ("draft.num_speculative_tokens is 9", {"draft.num_speculative_tokens": 9}),
        (r"draft.layer_ids: \[1, 1, 3\] must be different layers", {"draft.layer_ids": "[1, 1, 3]"}),
        (r"draft.layer_ids: \[1, 2, 9\] must be 3 layers", {"draft.layer_ids": "[1, 2, 9]"}),
        ("method.type is lora", {"method.type": "lora"}),
        ("train.torch_compile", {"train.torch_compile": True}),
        ("eval.sample_prompts are answered by the model", {"eval.sample_prompts": "[Once]"}),
        ("gradient_checkpointing is offload, and with task", {"train.gradient_checkpointing": "offload"}),
        ("does not know them before", {"data.streaming": True, "data.val_split": 0, "draft.draft_vocab_size": 300}),
        ("nowhere holds no draft head", {"draft.head_path": "./nowhere"}),
        (r"draft.adapter_path: nowhere/adapter_config.json cannot be read", {"draft.adapter_path": "nowhere"}),
        ("draft.load_in_4bit is read with task: draft only", {"task": "sft", "draft.load_in_4bit": True}),
        ("draft.adapter_path is read with task: draft only", {"task": "sft", "draft.adapter_path": "adapter"}),
    ],
)
def test_bad_input_is_refused(words, settings, tmp_path) -> None:
    with pytest.raises(UserError, match=words) as caught:
        plan_draft(tmp_path / "run", **settings)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run").exists()


IDS = list(range(400, 500))
TOO_LARGE = [500, 512]
FEW = IDS[:5]
NO_ANSWER = {"messages": [{"role": "user", "content": "Once upon a time there was"}]}


@pytest.mark.parametrize(
    ("words", "row"),
    [
        (r"`input_ids` holds 512, and the tokenizer's ids are 0 to 511", {"input_ids": TOO_LARGE, "labels": TOO_LARGE}),
        ("no row can be used: all 8 are dropped .8 no answer", NO_ANSWER),
        ("0 % of its tokens would be trained: all 8 are dropped", {"input_ids": IDS, "labels": [-100] * 100}),
        # step 4 reads the token 4 positions after that of its state, and predicts the next one
        ("draft.steps: 4, and no training example has a trained token after", {"input_ids": FEW, "labels": FEW}),
        ("its first 5, which is what step 4 predicts", {"input_ids": IDS, "labels": FEW + [-100] * 95}),
        ("", {"input_ids": IDS, "labels": [-100] * 5 + IDS[5:6] + [-100] * 94}),
    ],
)
def test_data_that_no_step_can_learn_from_are_refused(words, row, tmp_path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for _ in range(8)))
    settings = {"data.datasets.0.path": data, "data.val_split": 0, "eval.eval_strategy": "no"}
    if not words:
        assert plan_draft(tmp_path / "run", **settings).plan.data.trained_tokens == 8
        return
    with pytest.raises(UserError, match=words) as caught:
        plan_draft(tmp_path / "run", **settings)
    assert caught.value.exit_code == 2


def test_held_out_examples_must_reach_the_last_step(tmp_path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"text": "a"}) + "\n")
    settings = {"data.val_split": 0, "data.eval_datasets": f"[{{path: {held_out}}}]"}
    with pytest.raises(UserError, match="no evaluation example has a trained token after its first 5"):
        plan_draft(tmp_path / "run", **{**SHORT, **settings})


def test_tokenizers_and_heads_of_another_vocabulary_are_refused(corpus, tmp_path) -> None:
    other = {"model.tokenizer.path": corpus / "tokenizers" / "qwen2.5"}
    with pytest.raises(UserError, match="its highest token id is 151664, but the model's vocabulary has 512") as caught:
        plan_draft(tmp_path / "run", **{**SHORT, **other})
    assert caught.value.exit_code == 2
    train_draft(tmp_path / "head", **{**SHORT, "train.max_steps": 1, "eval.eval_strategy": "no"})
    config = tmp_path / "head" / "draft" / "eagle3" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "vocab_size": 600, "draft_vocab_size": 600}))
    with pytest.raises(UserError, match="drafts for a model with vocab_size 600, and this one has 512") as caught:
        plan_draft(tmp_path / "run", **{**SHORT, "draft.head_path": tmp_path / "head"})
    assert caught.value.exit_code == 2
