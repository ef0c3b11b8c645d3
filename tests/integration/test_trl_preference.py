"""TRL's trainers as clients: task: dpo has their losses and rewards in each step, on the same pairs in float32.

They take 200 real pairs of the test corpus: prompts of ShareGPT users with answers of Qwen3-235B and GPT-4. The short
test takes bundled pairs.
"""

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from support.command_line import ROOT
from support.quickstart_runs import plan_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from ligertune.data.batching.order import DataOrder
from ligertune.models.trainable import apply_method
from ligertune.run import run
from ligertune.training.setup import Job

trl = pytest.importorskip("trl")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

MODEL = ROOT / "configs" / "quickstart" / "stories260K"
PAIRS = ROOT / "configs" / "quickstart" / "preferences.jsonl"
STEPS, BATCH, RATE = 20, 10, 1e-5
# First or last characters of a real prompt and answer. The model's own rounding is 1e-6 of a log-probability: on sums
# of -300 it is 2e-4 from float64, on short texts less than what is compared. Characters it has never seen are left out.
LONGEST = 40
SLOW = [pytest.mark.slow, pytest.mark.corpus]
SAME = 1e-5
LORA = {"method.type": "lora", "method.lora_r": 4, "train.learning_rate": 10 * RATE}
OURS = {
    "task": "dpo",
    "data.datasets": [{"path": str(PAIRS)}],
    "data.datasets.0.max_samples": 220,
    "data.val_split": 0.0,
    "data.max_length": 512,
    "model.dtype": "float32",
    "train.group_by_length": False,
    "train.per_device_train_batch_size": BATCH,
    "train.gradient_accumulation_steps": 1,
    "train.max_steps": STEPS,
    "train.learning_rate": RATE,
    "train.lr_scheduler_type": "constant",
}
THEIRS = {
    "max_length": 512, "max_steps": STEPS, "per_device_train_batch_size": BATCH, "learning_rate": RATE,
    "lr_scheduler_type": "constant", "train_sampling_strategy": "sequential", "logging_steps": 1,
    "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True, "bf16": False,
    "gradient_checkpointing": False,
}  # fmt: skip
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
DPO_MEASURES = (*REWARDS, "logps/chosen", "logps/rejected", "entropy", "mean_token_accuracy")


@pytest.fixture
def real(corpus: Path, tmp_path: Path) -> dict[str, object]:
    """The override that names a file of real pairs."""
    lines = (corpus / "sharegpt" / "sharegpt_gpt4_256.jsonl").read_text(encoding="utf-8").split("\n")
    conversations = [[turn["value"] for turn in json.loads(line)["conversations"]] for line in lines if line]
    answers = {a.strip(): b for turns in conversations for a, b in pairwise(turns)}
    rows = []
    lines = (corpus / "messages" / "sharegpt_gpt4-qwen3_a22B_output.jsonl").read_text(encoding="utf-8").split("\n")
    for line in filter(None, lines):
        prompt, answer = (message["content"].strip() for message in json.loads(line)["messages"][:2])
        texts = (text.encode("ascii", "ignore").decode() for text in (prompt, answer, answers.get(prompt, "")))
        whole = [" ".join(text.split()) for text in texts]
        for part in (slice(LONGEST), slice(-LONGEST, None)):
            prompt, chosen, rejected = (text[part] for text in whole)
            if chosen and rejected and chosen != rejected:
                rows.append({"prompt": f"{len(rows)}. {prompt}\n", "chosen": chosen, "rejected": rejected})
    assert len(rows) >= STEPS * BATCH
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"data.datasets": [{"path": str(file)}]}


def ours(folder: Path, steps: int, **changes: object) -> tuple[list[dict], Job, Dataset]:
    """Train with ligertune; return its lines, its plan, and the rows in the order in which it read them."""
    job = plan_run(folder, **{**OURS, **changes, "train.max_steps": steps})
    plan, examples = job.plan, job.data.train
    order = DataOrder(examples.lengths, total_rows=steps * BATCH, seed=plan.build.seed, batching=plan.batching)
    read = [int(row[0]) for step in range(steps) for row in order.step(step)]
    rows = [json.loads(line) for line in Path(plan.data_options.datasets[0].path).read_text().splitlines()]
    lines: list[dict] = []
    run(job, lines.append)
    in_order = [rows[int(examples[index].source.split(":")[-1]) - 1] for index in read]
    return [line for line in lines if "loss" in line], job, Dataset.from_list(in_order)


def theirs(trainer: type, config: type, job: Job, rows: Dataset, steps: int, **options: object) -> list[dict]:
    """Train with a trainer of TRL, with the same initial weights and adapter; return its lines."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model = apply_method(model, job.plan.build.method, seed=job.plan.build.seed)
    rate = job.plan.schedule.learning_rate
    given = {**THEIRS, "learning_rate": rate, **options, "max_steps": steps}
    made = trainer(
        model, args=config(str(job.plan.output_dir / "trl"), **given), train_dataset=rows, processing_class=tokenizer
    )
    made.train()
    return [line for line in made.state.log_history if "loss" in line]


def check(found: list[dict], expected: list[dict], names: tuple[str, ...], steps: int) -> None:
    assert len(found) == len(expected) == steps
    allowed = (
        SAME if steps < STEPS else 4e-3
    )  # of 20 steps, one counts one token of 339 otherwise: by rounding, it seems
    for line, other in zip(found, expected, strict=True):
        skipped = {"rewards/accuracies"} if line["step"] == 1 else set()  # rewards of 0 up to rounding
        chosen = [name for name in ("loss", *names) if name not in skipped]
        if "mean_token_accuracy" in chosen:
            chosen.remove("mean_token_accuracy")
            assert line["mean_token_accuracy"] == pytest.approx(other["mean_token_accuracy"], abs=allowed)
        assert {name: line[name] for name in chosen} == pytest.approx(
            {name: other[name] for name in chosen}, rel=SAME, abs=SAME
        ), line["step"]
    assert len({line["loss"] for line in expected}) >= steps - 1  # it has trained


def prefixed(preference: dict[str, object]) -> dict[str, object]:
    return {f"preference.{key}": value for key, value in preference.items()}


DPO = [
    ({"loss_type": "sigmoid"}, {"loss_type": ["sigmoid"]}),
    ({"loss_type": "ipo"}, {"loss_type": ["ipo"]}),
    ({"loss_type": "hinge"}, {"loss_type": ["hinge"]}),
    ({"loss_type": "robust", "label_smoothing": 0.2}, {"loss_type": ["robust"], "label_smoothing": 0.2}),
    ({"length_normalization": True}, {"loss_type": ["sigmoid_norm"]}),
    ({"sft_weight": 0.5}, {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
    ({"ld_alpha": 0.3}, {"ld_alpha": 0.3}),
]


@pytest.mark.parametrize(
    ("preference", "options", "steps"),
    [
        pytest.param({"loss_type": "sigmoid"}, {"loss_type": ["sigmoid"]}, 4, marks=pytest.mark.slow, id="short"),
        *(pytest.param(*case, STEPS, marks=SLOW, id="-".join(map(str, case[0].values()))) for case in DPO),
    ],
)
def test_dpo_with_precomputed_log_probabilities(preference, options, steps, tmp_path, request):
    pairs = request.getfixturevalue("real") if steps == STEPS else {}
    found, job, rows = ours(tmp_path, steps, **prefixed(preference), **pairs)
    options = {**options, "precompute_ref_log_probs": True}
    check(found, theirs(trl.DPOTrainer, trl.DPOConfig, job, rows, steps, **options), DPO_MEASURES, steps)


@pytest.mark.slow
@pytest.mark.corpus
def test_dpo_of_an_adapter(real, tmp_path):
    """The reference is the model with its adapter switched off."""
    found, job, rows = ours(tmp_path, STEPS, **LORA, **real)
    check(found, theirs(trl.DPOTrainer, trl.DPOConfig, job, rows, STEPS), DPO_MEASURES, STEPS)


@pytest.mark.slow
@pytest.mark.corpus
def test_simpo(real, tmp_path):
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    found, job, rows = ours(
        tmp_path, STEPS, **prefixed({"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0}), **real
    )
    options = {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0}
    check(found, theirs(CPOTrainer, CPOConfig, job, rows, STEPS, **options), REWARDS, STEPS)


@pytest.mark.slow
@pytest.mark.corpus
def test_orpo(real, tmp_path):
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    found, job, rows = ours(tmp_path, STEPS, **prefixed({"loss_type": "orpo", "orpo_alpha": 0.3}), **real)
    check(found, theirs(ORPOTrainer, ORPOConfig, job, rows, STEPS, beta=0.3), REWARDS, STEPS)


@pytest.mark.slow
@pytest.mark.corpus
@pytest.mark.parametrize(
    "method", [{"train.learning_rate": RATE / 3}, {**LORA, "train.learning_rate": 3 * RATE}], ids=["full", "lora"]
)
def test_kto(method, real, tmp_path):
    """TRL mismatches answers in the order of the file, and then reads the rows in ours."""
    lines = Path(real["data.datasets"][0]["path"]).read_text(encoding="utf-8").splitlines()
    pairs = [json.loads(line) for line in lines][: STEPS * BATCH]
    words = [
        pair["chosen" if i % 3 else "rejected"].split()[:8] for i, pair in enumerate(pairs)
    ]  # small sums round less
    rows = [
        {"prompt": pair["prompt"], "completion": " ".join(words[i]), "label": bool(i % 3)}
        for i, pair in enumerate(pairs)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    weights = {"desirable_weight": 1.0, "undesirable_weight": 1.5}
    changes = {**method, **prefixed({"loss_type": "kto", **weights}), "data.datasets": [{"path": str(file)}]}
    found, job, in_order = ours(tmp_path, STEPS, **changes)
    places = [rows.index(row) for row in in_order.to_list()]
    assert sorted(places) == list(range(len(rows))) != places

    class InOurOrder(trl.KTOTrainer):
        def _get_train_sampler(self, *arguments: object) -> list[int]:
            return places

    options = {**weights, "precompute_ref_log_probs": "method.type" not in method}
    names = ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected", "entropy")
    expected = theirs(InOurOrder, trl.KTOConfig, job, Dataset.from_list(rows), STEPS, **options)
    assert any(line["kl"] > 0 for line in expected)
    kl = [line["kl"] for line in expected]  # a difference of sums of about -300, whose rounding is 2e-5
    assert [line["kl"] for line in found] == pytest.approx(kl, rel=1e-4, abs=1e-4)
    check(found, expected, names, STEPS)
