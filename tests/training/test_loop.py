"""A run equals a training loop in plain PyTorch: losses, norms, rates, token counts, weights and evaluation."""

import gc
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from quickstart_runs import plan_run
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ligertune.data.examples import Example, Examples
from ligertune.planning.memory.model_shape import ModelShape
from ligertune.run import run

STEPS = 4
USUAL = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0,
    "min_lr_ratio": 0.1,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "seed": 42,
}
# Each key of USUAL has another value in one run, so a wrong effect of any key is noticed.
RUNS = {
    "usual": {},
    "decay, betas, eps": {"lr_scheduler_type": "linear", "weight_decay": 1.0, "adam_beta1": 0.5, "adam_beta2": 0.9,
                          "adam_epsilon": 1e-2, "learning_rate": 8e-3},
    "warm-up, floor, no clipping": {"lr_scheduler_type": "cosine_with_min_lr", "warmup_steps": 2, "min_lr_ratio": 0.5,
                                    "max_grad_norm": 0.0, "seed": 7},
    "another cut": {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3, "max_grad_norm": 0.5,
                    "lr_scheduler_type": "constant"},
}  # fmt: skip


def rate(step: int, how: SimpleNamespace) -> float:
    if step < how.warmup_steps:
        return how.learning_rate * (step + 1) / how.warmup_steps
    done = (step - how.warmup_steps) / (STEPS - how.warmup_steps)
    cosine = 0.5 + 0.5 * math.cos(math.pi * done)
    floor = how.min_lr_ratio
    shapes = {"linear": 1 - done, "cosine": cosine, "cosine_with_min_lr": floor + (1 - floor) * cosine, "constant": 1.0}
    return how.learning_rate * shapes[how.lr_scheduler_type]


def loss_sum(model: nn.Module, example: Example) -> Tensor:
    """Return the summed loss of one example without padding. Each token predicts the label at the next position."""
    ids, labels = (torch.from_numpy(np.array(t)).long() for t in (example.input_ids, example.labels))
    return F.cross_entropy(model(input_ids=ids[None]).logits[0, :-1], labels[1:], ignore_index=-100, reduction="sum")


def tokens_of(example: Example) -> tuple[int, int]:
    return len(example.input_ids), int((example.labels != -100).sum())


def plain_loop(folder: Path, examples: Examples, how: SimpleNamespace) -> tuple[list[dict], nn.Module]:
    """Return the expected lines of metrics.jsonl, and the trained model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    groups = [{"params": [p for p in model.parameters() if (p.ndim < 2) is vector],
               "weight_decay": 0.0 if vector else how.weight_decay} for vector in (False, True)]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, betas=(how.adam_beta1, how.adam_beta2), eps=how.adam_epsilon)
    micro, size = how.per_device_train_batch_size, how.per_device_train_batch_size * how.gradient_accumulation_steps
    epochs = [np.random.default_rng([how.seed, epoch]).permutation(len(examples)) for epoch in range(3)]
    order, lines = np.concatenate(epochs).tolist(), []
    for step in range(STEPS):
        batch = [examples[i] for i in order[step * size : (step + 1) * size]]
        trained = sum(tokens_of(example)[1] for example in batch)
        loss = sum(loss_sum(model, example) for example in batch) / trained
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), how.max_grad_norm) if how.max_grad_norm else None
        for group in optimizer.param_groups:
            group["lr"] = rate(step, how)
        optimizer.step()
        optimizer.zero_grad()
        lengths = [tokens_of(example)[0] for example in batch]
        lines.append({
            "step": step + 1, "loss": loss.item(), "grad_norm": norm.item() if norm else 0, 
            "learning_rate": rate(step, how), "tokens": sum(lengths),
            "trained_tokens": trained, "epoch": round((step + 1) * size / len(examples), 4),
            "squared_lengths": sum(length**2 for length in lengths), "padded_tokens": sum(
                len(row) * -(-max(row) // 16) * 16 for row in (lengths[i : i + micro] for i in range(0, size, micro))
            ),
        })  # fmt: skip
    return lines, model


@pytest.mark.parametrize("name", RUNS)
def test_a_run_equals_the_plain_loop(name, quickstart, tmp_path, monkeypatch):
    squares = []  # of the documents' lengths: what attention costs
    monkeypatch.setattr(ModelShape, "flops", lambda *_, squared_lengths, **__: squares.append(squared_lengths) or 1.0)
    how = SimpleNamespace(**USUAL | RUNS[name])
    changes = {f"train.{key}": value for key, value in vars(how).items()}
    job = plan_run(tmp_path, **changes, **{"train.max_steps": STEPS, "train.group_by_length": False})
    report = run(job, lambda line: None)
    assert (len(job.data.train), len(job.data.eval)) == (36, 4)
    expected, model = plain_loop(quickstart / "stories260K", job.data.train, how)

    assert squares == [line.pop("squared_lengths") for line in expected]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for line, wanted in zip([line for line in lines if "loss" in line], expected, strict=True):
        assert {key: line[key] or 0 for key in wanted} == pytest.approx(wanted, rel=1e-4)
    saved = load_file(tmp_path / "run" / "model" / "model.safetensors")
    for key, value in model.state_dict().items():
        torch.testing.assert_close(saved[key], value, rtol=1e-3, atol=1e-4) if key in saved else None
    with torch.no_grad():
        mean = sum(loss_sum(model, example) for example in job.data.eval) / job.data.eval.trained.sum()
    assert report.eval_loss == lines[-1]["eval_loss"] == pytest.approx(mean.item(), rel=1e-4)


def test_objects_of_before_the_first_step_are_not_collected_during_training(tmp_path):
    """A collection that visits them takes half a second in the middle of a step."""
    job = plan_run(tmp_path, **{"train.max_steps": STEPS, "logging.logging_steps": 1})
    frozen = []
    run(job, lambda line: frozen.append(gc.get_freeze_count()))
    assert min(frozen) > 100_000
    assert gc.get_freeze_count() == 0
