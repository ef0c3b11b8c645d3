"""`ligertune sample`: what it writes, what it refuses, and that it continues where it was."""

import json
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.command_line import Background, Done, overrides, run_here, wait_until
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ligertune.data.rows.conversation import Message
from ligertune.decode.generate import Decoding, load_model
from ligertune.errors import UserError
from ligertune.features.sample import answer_files
from ligertune.features.sample.answer_files import StoredAnswer, read_answers
from ligertune.features.sample.sample_prompts import SamplePrompt
from ligertune.features.sample.sample_run import generate, open_job, sample_recipe
from ligertune.features.sample.scoring.score_functions import ScoreFunctions
from ligertune.features.sample.scoring.score_model import ScoreModel
from ligertune.planning.options import RunOptions
from ligertune.recipe.read import load_recipe
from ligertune.serving.openai_server import ServedRun, listen

LONGER = {"sample.num_generations": 8, "sample.max_new_tokens": 16}  # enough to be killed in between
Answers = dict[tuple[int, int], StoredAnswer]


def sample(folder: Path, *arguments: str, **settings: object) -> Done:
    return run_here("sample", "recipe.yaml", *overrides(settings), *arguments, cwd=folder)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def texts(answers: Answers) -> dict[tuple[int, int], tuple]:
    return {key: (answer.text, answer.ids, answer.finish) for key, answer in answers.items()}


def test_answers_are_scored_kept_and_reported(folder):
    score = "[{function: rules.py:vowels}, {function: rules.py:near, weight: 2}]"
    done = sample(folder, "--json", **{"sample.score": score})
    assert done.code == 0, done.err
    report = json.loads(done.out)
    found = folder / "run-samples"
    written = json.loads((found / "report.json").read_text(encoding="utf-8"))
    assert {**written, "speed": 0, "tokens_per_second": 0} == {**report, "speed": 0, "tokens_per_second": 0}
    scored = lines(found / "scored.jsonl")
    assert len(scored) == report["answers"] == 36 and report["prompts"] == 12
    for row in scored:
        vowels = sum(letter in "aeiou" for letter in row["completion"])
        near = 1 / (1 + abs(len(row["completion"]) - int(row["prompt"][:-3]) - 1))
        assert row["scores"] == pytest.approx({"vowels": vowels, "near": near})
        assert row["score"] == pytest.approx(vowels + 2 * near)
    best = [max(scored[start : start + 3], key=lambda row: row["score"]) for start in range(0, 36, 3)]
    kept = lines(found / "kept.jsonl")
    assert kept == [{"prompt": row["prompt"], "completion": row["completion"]} for row in best]
    assert report["score"]["mean"] == pytest.approx(sum(row["score"] for row in scored) / 36)
    assert report["best_of"] == pytest.approx(sum(row["score"] for row in best) / 12)
    assert report["truncated_share"] == pytest.approx(sum(row["finish"] == "length" for row in scored) / 36)
    assert report["best"][0]["score"] == max(row["score"] for row in scored)
    assert report["tokens_per_second"] > 0 and sum(report["histogram"]["counts"]) == 36
    answers = read_answers(found)
    assert all(len(answer.ids) == len(answer.log_probs) == answer.tokens for answer in answers.values())


def test_a_second_call_answers_nothing_again_and_may_keep_others(folder):
    assert sample(folder).code == 0
    answers = (folder / "run-samples" / "answers-0.jsonl").read_bytes()
    done = sample(folder, **{"sample.keep": "pairs", "sample.score": "rules.py:near"})
    assert done.code == 0 and "tokens/s" not in done.out, done.err
    assert (folder / "run-samples" / "answers-0.jsonl").read_bytes() == answers
    assert {"chosen", "rejected"} <= lines(folder / "run-samples" / "kept.jsonl")[0].keys()
    refused = sample(folder, **{"sample.temperature": 0.5})
    assert refused.code == 2 and "were made with temperature: 1.0, and the recipe says 0.5" in refused.err
    (folder / "prompts.jsonl").write_text('{"prompt": "Once", "right": 1}\n', encoding="utf-8")
    assert "were made with prompts: 12" in sample(folder).err
    assert sample(folder, "--overwrite").code == 0
    assert len(read_answers(folder / "run-samples")) == 3


def test_answers_are_kept_if_a_score_function_fails(folder):
    for name, words in (("broken", "raised ValueError: no rule for this"), ("hangs", "took more than 0.5 seconds")):
        done = sample(folder, **{"sample.score": f"rules.py:{name}", "sample.score_timeout": 0.5})
        assert done.code == 2 and words in done.err and "Traceback" not in done.err
        assert len(read_answers(folder / "run-samples")) == 36
    answers = (folder / "run-samples" / "answers-0.jsonl").read_bytes()
    assert sample(folder).code == 0
    assert (folder / "run-samples" / "answers-0.jsonl").read_bytes() == answers


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sample.temprature": 1}, "Did you mean sample.temperature?"),
        ({"sample.top_p": 0}, "sample.top_p is 0"),
        ({"sample.keep": "above"}, "sample.threshold"),
        ({"sample.temperature": 0}, "all answers to a prompt are equal"),
        ({"sample.keep": "pairs", "sample.num_generations": 1}, "a pair needs two answers"),
        ({"sample.score": "rules.txt"}, "write file.py:function"),
        ({"sample.score": "none.py:f"}, "there is no file none.py"),
        ({"sample.score": "rules.py:nothing"}, "has no function nothing"),
        ({"sample.score": "[]"}, "nothing scores the answers"),
        ({"sample.source": "./none"}, "there is no folder ./none"),
        ({"sample.source": "m", "sample.url": "http://localhost/v1", "sample.url_model": "m"}, "both say who answers"),
        ({"sample.url": "http://localhost/v1"}, "Name the server's model"),
        ({"sample.max_new_tokens": 510}, "exceed the context of the model, 512 tokens"),
        ({"model.init": "random"}, "a model with random weights has no answers"),
        ({"sample.output_dir": "."}, "holds prompts.jsonl and no answers"),
    ],
)
def test_what_cannot_work_is_one_sentence_before_a_model_is_loaded(folder, settings, words):
    done = sample(folder, **settings)
    assert done.code == 2 and words in done.err and "Traceback" not in done.err, done.err
    assert not (folder / "run-samples").exists()


def test_one_output_folder_is_enough(folder):
    path = folder / "recipe.yaml"
    text = path.read_text(encoding="utf-8").replace("checkpoint: {output_dir: run}\n", "")
    path.write_text(text, encoding="utf-8")
    done = sample(folder)
    assert done.code == 2 and "checkpoint.output_dir" in done.err
    done = sample(folder, **{"sample.output_dir": "answers"})
    assert done.code == 0, done.err
    assert len(read_answers(folder / "answers")) == 36
    report = sample_recipe(path, [f"sample.output_dir={folder / 'python'}"])
    assert report.answers == 36
    path.write_text(f"{text}checkpoint: 5\n", encoding="utf-8")
    with pytest.raises(UserError, match="checkpoint is 5"):
        sample_recipe(path, ["sample.output_dir=answers"])
    path.write_text(text, encoding="utf-8")
    trained = run_here("train", "recipe.yaml", "--set", "sample.output_dir=answers", cwd=folder)
    assert trained.code == 2 and "checkpoint.output_dir" in trained.err


def test_launchers_of_others_are_refused(folder, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = sample(folder)
    assert done.code == 2 and "starts its own processes" in done.err


def test_nothing_kept_is_an_error_with_the_report(folder):
    done = sample(folder, "--json", **{"sample.keep": "above", "sample.threshold": 1000})
    assert done.code == 1 and "No answer is kept" in done.err
    assert json.loads(done.out)["notes"] == ["12 prompts without an answer of score 1000 or more."]


# ---- equal answers


@pytest.fixture
def answered(folder):
    """answered(name, world=1, **settings): the answers of these ranks, one after the other in this process."""

    def answer(name: str, world: int = 1, **settings: object) -> Answers:
        given = {"sample.output_dir": folder / name, **settings}
        recipe = load_recipe(folder / "recipe.yaml", [f"{key}={value}" for key, value in given.items()])
        with open_job(RunOptions.of(recipe), ScoreFunctions((), 1.0), overwrite=False) as job:
            for rank in range(world):
                generate(job, lambda share: None, rank=rank, world=world)
        return read_answers(folder / name)

    return answer


def test_ranks_and_batch_sizes_give_equal_answers(answered, folder):
    one = answered("one")
    assert texts(answered("two", world=2)) == texts(one)
    assert texts(answered("five", **{"sample.generation_batch_size": 5})) == texts(one)
    assert {path.name for path in (folder / "two").glob("answers-*")} == {"answers-0.jsonl", "answers-1.jsonl"}
    assert texts(answered("other", **{"sample.seed": 1})) != texts(one)
    assert len({answer.text for answer in one.values()}) > 20  # prompts and answers have seeds of their own


def test_only_the_missing_answers_of_a_prompt_are_added(answered, folder):
    whole = answered("one")
    path = folder / "one" / "answers-0.jsonl"
    kept = path.read_text(encoding="utf-8").splitlines(keepends=True)[::2]
    path.write_text("".join(kept), encoding="utf-8")
    assert texts(answered("one")) == texts(whole)
    written = lines(path)
    assert written[: len(kept)] == [json.loads(line) for line in kept] and len(written) == len(whole)


@pytest.mark.slow
def test_two_processes_give_the_answers_of_one(folder):
    assert sample(folder).code == 0
    two = Background(
        "sample", "recipe.yaml", "--set", "parallel.num_processes=2", "--set", "sample.output_dir=two", cwd=folder
    )
    assert two.finish().code == 0
    assert texts(read_answers(folder / "two")) == texts(read_answers(folder / "run-samples"))
    assert (folder / "two" / "kept.jsonl").read_bytes() == (folder / "run-samples" / "kept.jsonl").read_bytes()


# ---- kills


def lines_on_disk(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("answers-*.jsonl"))


def killed_after(folder: Path, count: int) -> dict[str, bytes]:
    """Kill a call with SIGKILL once `count` answers are on the disk; return the whole lines of its files."""
    found = folder / "run-samples"
    process = Background("sample", "recipe.yaml", *overrides(LONGER), cwd=folder)
    wait_until(process, lambda: lines_on_disk(found) >= count)
    process.send_signal(signal.SIGKILL)
    assert process.finish().code == -signal.SIGKILL
    return {path.name: path.read_bytes().rpartition(b"\n")[0] for path in found.glob("answers-*.jsonl")}


def check_resumed(folder: Path, before: dict[str, bytes], expected: Answers) -> None:
    """Finish the call: no finished answer was lost, and none was written twice."""
    found = folder / "run-samples"
    done = sample(folder, **LONGER)
    assert done.code == 0, done.err
    for name, content in before.items():
        assert (found / name).read_bytes().startswith(content)
    written = [row for path in found.glob("answers-*.jsonl") for row in lines(path)]
    assert Counter((row["prompt"], row["number"]) for row in written) == dict.fromkeys(expected, 1)
    assert texts(read_answers(found)) == texts(expected)
    assert len(lines(found / "scored.jsonl")) == len(expected)


@pytest.mark.parametrize(
    "counts", [(1, 50), pytest.param((0, 1, 10, 20, 35, 50, 60, 75, 85, 95), marks=pytest.mark.slow)]
)
def test_a_killed_call_continues(folder, answered, counts, monkeypatch):
    """Each call goes on where the one before was killed, until it has written so many answers in all."""
    monkeypatch.setattr(answer_files, "GROUP_LINES", 5)  # also in the calls, which are forks of this process
    expected = answered("undisturbed", **LONGER)
    assert len(expected) == 96
    before: dict[str, bytes] = {}
    for count in counts:
        before = killed_after(folder, count)
    check_resumed(folder, before, expected)


# ---- other sources


def test_a_folder_of_a_model_answers_as_the_recipes_model(folder, answered, quickstart):
    shutil.copytree(quickstart / "stories260K", folder / "copy")
    assert texts(answered("copied", **{"sample.source": folder / "copy"})) == texts(answered("own"))


def test_a_token_that_the_model_does_not_know_is_refused(folder, quickstart):
    shutil.copytree(quickstart / "stories260K", folder / "copy")
    tokenizer = AutoTokenizer.from_pretrained(folder / "copy")
    tokenizer.add_tokens(["1+1="])
    tokenizer.save_pretrained(folder / "copy")
    done = sample(folder, **{"sample.source": "./copy"})
    assert done.code == 2
    assert "gives a prompt the token id 512, and the model knows 512 tokens" in " ".join(done.err.split())


def test_the_python_function_does_what_the_command_does(folder):
    settings = [f"sample.output_dir={folder / 'python'}", "sample.keep=all", "data.cache=false"]
    report = sample_recipe(folder / "recipe.yaml", settings)
    assert sample(folder).code == 0
    assert report.kept == 36
    both = [lines(folder / name / "scored.jsonl") for name in ("python", "run-samples")]
    assert [{**row, "source": ""} for row in both[0]] == [{**row, "source": ""} for row in both[1]]


@pytest.fixture
def served(folder, quickstart) -> Iterator[str]:
    """The address of `ligertune serve` with the tiny model, which is called tiny."""
    server = listen("127.0.0.1", 0)
    loaded = load_model(str(quickstart / "stories260K"), raw=False)
    loaded.tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    server.served = ServedRun("tiny", loaded, Decoding(max_new_tokens=8), on_line=lambda line: None)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server.address
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_server_answers_and_the_key_is_in_no_file_and_no_output(folder, served, monkeypatch):
    key = "sk-0123456789-secret"
    monkeypatch.setenv("OPENAI_API_KEY", key)
    there = {"sample.url": served, "sample.url_model": "tiny", "sample.url_requests": 4, "sample.num_generations": 2}
    there |= {"data.datasets.0.max_samples": 4}
    done = sample(folder, "--json", **there)
    assert done.code == 0, done.err
    answers = read_answers(folder / "run-samples")
    assert len(answers) == 8 and len({answer.text for answer in answers.values()}) > 4
    assert all(answer.text and answer.tokens and not answer.ids for answer in answers.values())
    written = "".join(path.read_text(encoding="utf-8") for path in (folder / "run-samples").iterdir())
    assert key not in written + done.out + done.err
    (folder / "run-samples" / "answers-0.jsonl").write_bytes(b"")  # as if killed before the first answer
    assert sample(folder, **there).code == 0
    assert texts(read_answers(folder / "run-samples")) == texts(answers)  # the seeds of the requests are the same
    refused = sample(folder, "--overwrite", **{**there, "sample.url_model": "large"})
    assert refused.code == 2 and "refuses the request with the status 404: The model is called tiny" in refused.err


def test_a_model_scores_as_transformers_does(folder, quickstart):
    """The score head's output at the last token of prompt, answer and EOS, one text at a time."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(quickstart / "stories260K", num_labels=1)
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(folder / "judge")
    tokenizer = AutoTokenizer.from_pretrained(quickstart / "stories260K")
    tokenizer.save_pretrained(folder / "judge")
    data = load_recipe(folder / "recipe.yaml").data
    judge = ScoreModel(str(folder / "judge"), data, "plain", trust_remote_code=False)
    asked = [(f"{number}+1=", answer) for number, answer in enumerate(["2", "the sun is up", " a", "2 3 4"])]
    prompts = [SamplePrompt((), "plain", (Message("user", prompt),), (), prompt, {}, "rows:1") for prompt, _ in asked]
    found = judge(prompts, [answer for _, answer in asked], lambda share: None)
    for (prompt, answer), score in zip(asked, found, strict=True):
        ids = tokenizer(prompt + answer, return_tensors="pt").input_ids
        ids = torch.cat([ids, torch.tensor([[tokenizer.eos_token_id]])], dim=1)
        with torch.no_grad():
            hidden = model.model(input_ids=ids).last_hidden_state
            assert score == pytest.approx(float(model.score(hidden[0, -1])), abs=1e-4)
    done = sample(folder, **{"sample.score_model": "judge", "sample.score": "rules.py:near"})
    assert done.code == 0 and "score of score_model" in done.out, done.err
    row = lines(folder / "run-samples" / "scored.jsonl")[0]
    assert row["score"] == pytest.approx(sum(row["scores"].values()))
    refused = sample(folder, **{"sample.score_model": quickstart / "stories260K"})
    assert refused.code == 2 and "writes text, and one score is needed" in refused.err
