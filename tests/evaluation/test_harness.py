"""Tasks of lm-evaluation-harness on a model and on a run: the numbers of `lm_eval --model hf`.

The extra `dev` brings lm-eval: without it the fast tests fail, and only the slow ones are skipped.
"""

import json
import socket
from pathlib import Path

import pytest
import torch
from support.command_line import losses, metrics, run_here
from support.quickstart_runs import train
from transformers import AutoModelForCausalLM, AutoTokenizer

OUTPUTS = {
    "multiple_choice": {
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        # brier_score follows each log-likelihood; the others follow only their order
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}, {"metric": "brier_score"}],
    },
    "loglikelihood_rolling": {
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "generate_until": {
        "doc_to_text": "{{question}}\n",
        "doc_to_target": "{{greedy}}",
        "generation_kwargs": {"until": [".", "\n\n"], "max_gen_toks": 24},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def model_run(tmp_path_factory) -> Path:
    """The folder of a short run of all weights."""
    folder = tmp_path_factory.mktemp("tasks")
    train(folder, **{"train.max_steps": 2, "train.learning_rate": 1e-2})
    return folder / "run"


@pytest.fixture(scope="module")
def documents(quickstart) -> list[dict]:
    """Eight documents: a question, four answers to choose from, and a text."""
    rows = [json.loads(line) for line in (quickstart / "dolly_short.jsonl").read_text(encoding="utf-8").splitlines()]
    found = []
    for number in range(8):
        document = {"question": rows[number]["instruction"], "answer": number % 4}
        document["choices"] = [row["output"][:40] for row in rows[4 * number :][:4]]
        document["text"] = " ".join(row["output"] for row in rows[9 * number :][:9])
        found.append(document)
    return found


def write_task(folder: Path, kind: str, documents: list[dict]) -> Path:
    """Write a task of this kind with its documents. Returns its YAML file."""
    data = folder / f"{kind}.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in documents), encoding="utf-8")
    task = {"task": f"local_{kind}", "dataset_path": "json", "test_split": "test", "output_type": kind, **OUTPUTS[kind]}
    task["dataset_kwargs"] = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}
    path = folder / f"{kind}.yaml"
    path.write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML
    return path


@pytest.fixture(scope="module")
def tasks(model_run, documents, tmp_path_factory) -> dict[str, Path]:
    """YAML files of a task of each kind. Every second answer of `generate_until` is what the model writes."""
    pytest.importorskip("lm_eval")
    folder = tmp_path_factory.mktemp("yaml")
    model = AutoModelForCausalLM.from_pretrained(model_run / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_run / "model")
    answered = []
    for number, document in enumerate(documents):
        ids = tokenizer(f"{document['question']}\n", return_tensors="pt").input_ids
        with torch.no_grad():
            made = model.generate(ids, do_sample=False, max_new_tokens=24, pad_token_id=0)[0, ids.shape[1] :]
        answer = tokenizer.decode(made, skip_special_tokens=True).split("\n\n")[0].split(".")[0]
        answered.append({**document, "greedy": answer if number % 2 else "another"})
    return {kind: write_task(folder, kind, answered) for kind in OUTPUTS}


def evaluated(target: Path, *arguments: object) -> dict:
    done = run_here("eval", target, *arguments, "--json", cwd=target.parent)
    assert done.code == 0, done.err
    return json.loads(done.out)


def of_lm_eval(model: Path, task: Path) -> dict[str, tuple[float, object]]:
    """Return the measures of `lm_eval --model hf` and their standard errors."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    plain = HFLM(pretrained=str(model), dtype="float32", device="cpu", batch_size=3)
    found = lm_eval.simple_evaluate(plain, tasks=[str(task)], task_manager=TaskManager(include_defaults=False))
    (values,) = found["results"].values()
    names = [name.removesuffix(",none") for name in values if name.endswith(",none") and "_stderr" not in name]
    return {name: (float(values[f"{name},none"]), values[f"{name}_stderr,none"]) for name in names}


def check_task(kind: str, target: Path, model: Path, task: Path) -> None:
    """Compare `ligertune eval` of a target with lm_eval on its model."""
    found = evaluated(target, "--tasks", task, "--no-base")
    expected = of_lm_eval(model, task)
    assert found["examples"] == 8
    assert len(expected) == len(found["metrics"]) == len(OUTPUTS[kind]["metric_list"])
    for name, (value, stderr) in expected.items():
        measured = found["metrics"][f"local_{kind}/{name}"]
        assert measured["value"] == pytest.approx(value, rel=1e-6), name
        assert measured["stderr"] == (pytest.approx(stderr, rel=1e-6) if isinstance(stderr, float) else None)


def test_a_multiple_choice_task_has_the_numbers_of_lm_eval_without_a_network(
    quickstart, documents, tmp_path, monkeypatch
):
    reached = []

    def refuse(connection: socket.socket, address: object) -> None:
        reached.append(address)
        raise OSError("the test has no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    model = quickstart / "stories260K"
    check_task("multiple_choice", model, model, write_task(tmp_path, "multiple_choice", documents))
    assert not reached


@pytest.mark.slow
@pytest.mark.parametrize("kind", OUTPUTS)
def test_tasks_on_a_run_have_the_numbers_of_lm_eval(kind, model_run, tasks):
    check_task(kind, model_run, model_run / "model", tasks[kind])


@pytest.mark.slow
def test_answers_match_and_the_base_model_is_next_to_the_run(model_run, tasks):
    chosen = ",".join(str(tasks[kind]) for kind in ("generate_until", "loglikelihood_rolling"))
    before = torch.random.get_rng_state()
    metrics = evaluated(model_run, "--tasks", chosen)["metrics"]
    assert torch.equal(before, torch.random.get_rng_state())
    matches = metrics["local_generate_until/exact_match"]
    assert (matches["value"], matches["base"]["value"]) == (0.5, 0.0)
    assert matches["difference"]["stderr"] == pytest.approx(0.5 / 7**0.5)  # of eight differences, four of them 1
    bits = metrics["local_loglikelihood_rolling/bits_per_byte"]
    assert bits["base"]["value"] != bits["value"]
    assert bits["difference"]["value"] == pytest.approx(bits["value"] - bits["base"]["value"])


@pytest.mark.slow
def test_a_setting_that_slots_lack_is_told_in_a_note(model_run, tasks):
    task = json.loads(tasks["generate_until"].read_text(encoding="utf-8"))
    task["generation_kwargs"]["no_repeat_ngram_size"] = 2
    file = tasks["generate_until"].with_name("no_repeat.yaml")
    file.write_text(json.dumps(task), encoding="utf-8")
    assert evaluated(model_run, "--tasks", tasks["generate_until"], "--no-base")["notes"] == []
    (note,) = evaluated(model_run, "--tasks", file)["notes"]  # of two models
    assert "generate" in note and "slots have no no_repeat_ngram_size" in note


def test_tasks_that_cannot_be_evaluated_are_refused(quickstart, documents, tmp_path):
    def refusal(*arguments: object) -> str:
        done = run_here("eval", quickstart / "stories260K", *arguments, cwd=tmp_path)
        assert done.code == 2 and "Traceback" not in done.err
        return " ".join(done.err.split())

    task = write_task(tmp_path, "generate_until", documents)
    assert "there is no file missing.yaml" in refusal("--tasks", "missing.yaml")
    assert "--tasks and --data both say" in refusal("--tasks", task, "--data", "x.jsonl")
    assert "--num-fewshot belongs to --tasks" in refusal("--num-fewshot", 2)
    broken = tmp_path / "broken.yaml"
    broken.write_text("task: broken\ndataset_path: json\ndataset_kwargs: {data_files: {test: gone.jsonl}}\n")
    assert "--tasks: " in refusal("--tasks", broken)


def test_without_lm_eval_the_command_says_what_to_install(quickstart, tmp_path, monkeypatch):
    monkeypatch.setattr("ligertune.decode.harness.find_spec", lambda name: None)
    done = run_here("eval", quickstart / "stories260K", "--tasks", "arc_easy", cwd=tmp_path)
    assert done.code == 2
    assert "pip install 'lm-eval>=0.4.13'" in done.err


@pytest.mark.slow
def test_a_run_evaluates_tasks_with_each_evaluation(tasks, tmp_path):
    """The last numbers are those of the trained model; the losses are those of a run without tasks."""
    settings = {"train.max_steps": 2, "eval.eval_strategy": "steps", "eval.eval_steps": 1, "method.type": "lora",
                "method.lora_dropout": 0.5, "train.learning_rate": 1e-2}  # fmt: skip
    named = f"[{tasks['multiple_choice']}, {tasks['loglikelihood_rolling']}]"
    report = train(tmp_path / "asked", **settings, **{"eval.tasks": named, "eval.answer_samples": 4})
    train(tmp_path / "silent", **settings)
    lines = [line for line in metrics(tmp_path / "asked" / "run") if "eval_local_multiple_choice/acc" in line]
    assert [line["step"] for line in lines] == [1, 2]
    assert losses(tmp_path / "asked" / "run") == losses(tmp_path / "silent" / "run")
    chosen = f"{tasks['multiple_choice']},{tasks['loglikelihood_rolling']}"
    found = evaluated(tmp_path / "asked" / "run", "--tasks", chosen, "--max-samples", 4, "--no-base")["metrics"]
    for name, measured in found.items():
        assert report.eval_measures[name] == pytest.approx(measured["value"], rel=1e-5), name
    assert "<th>local_multiple_choice/acc</th>" in (tmp_path / "asked/run/report.html").read_text(encoding="utf-8")
