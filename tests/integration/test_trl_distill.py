"""Distillation by TRL's GKDTrainer as a client: the same losses, step by step, on the same batches."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from support.quickstart_runs import plan_run
from support.tasks.distill_runs import TEACHER, distill_settings, save_student
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ligertune.features.distill.divergence import Divergence
from ligertune.run import run

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it is experimental
    from trl.experimental.gkd import GKDConfig, GKDTrainer

ROWS, RATE = 4, 1e-3
BETA = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.3}


def ours(folder: Path, student: Path, loss: str, steps: int) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Return the losses of `ligertune train`, and its batches."""
    beta = {"distill.beta": BETA[loss]} if loss == "jsd" else {}
    settings = {
        "distill.loss": loss, "train.learning_rate": RATE, "train.lr_scheduler_type": "constant",
        "train.max_steps": steps, "train.per_device_train_batch_size": ROWS, "train.gradient_accumulation_steps": 1,
        "data.datasets.0.max_samples": 200,
    }  # fmt: skip
    batches, lines = [], []

    def record(model: PreTrainedModel) -> None:
        def keep(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if module.training:
                batches.append({name: kwargs[name] for name in ("input_ids", "labels")})

        model.register_forward_pre_hook(keep, with_kwargs=True)

    run(plan_run(folder, **distill_settings(student, **settings, **beta)), lines.append, change=record)
    return [line["loss"] for line in lines if "loss" in line], batches


class Recorded(GKDTrainer):
    """GKDTrainer, which logs its losses with four digits: `losses` are exact."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(float(loss))
        return loss


def theirs(folder: Path, student: Path, loss: str, batches: list[dict[str, torch.Tensor]]) -> list[float]:
    """Return the losses of GKDTrainer on these batches."""
    settings = GKDConfig(
        output_dir=str(folder), max_steps=len(batches), per_device_train_batch_size=ROWS, learning_rate=RATE,
        lr_scheduler_type="constant", optim="adamw_torch", weight_decay=0.0, max_grad_norm=1.0, seed=3,
        save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, bf16=False,
        gradient_checkpointing=False, remove_unused_columns=False, dataset_kwargs={"skip_prepare_dataset": True},
        lmbda=0.0, beta=BETA[loss],  # its temperature is that of sampling
    )  # fmt: skip
    queue = iter(batches)

    def next_batch(rows: list[dict]) -> dict[str, torch.Tensor]:
        batch = next(queue)
        mask = torch.ones_like(batch["input_ids"])
        # the trainer wants to know how long the prompts are, and trains on labels behind them
        prompts = {"prompts": batch["input_ids"][:, :1], "prompt_attention_mask": mask[:, :1]}
        return {**batch, "attention_mask": mask, **prompts}

    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (student, TEACHER)]
    trainer = Recorded(
        model=models[0],
        teacher_model=models[1],
        args=settings,
        data_collator=next_batch,
        train_dataset=Dataset.from_list([{"input_ids": [1]}] * ROWS * len(batches)),
        processing_class=AutoTokenizer.from_pretrained(TEACHER),
    )
    trainer.losses = []
    trainer.train()
    return trainer.losses


@pytest.mark.parametrize("loss", BETA)
def test_the_divergence_at_a_temperature_is_that_of_trl(loss):
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 3, 8, 50).unbind()
    labels = torch.randint(50, (3, 8)).index_fill(1, torch.tensor([0, 5]), -100)
    their = GKDTrainer.generalized_jsd_loss(student, teacher, labels, beta=BETA[loss], temperature=0.7)
    found = Divergence(BETA[loss], 0.7).sum_of_logits(*(t.flatten(0, 1) for t in (student, teacher, labels)))
    torch.testing.assert_close(found / (labels != -100).sum(), their)


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "steps"), [("jsd", 3), *((loss, 20) for loss in BETA)])
def test_losses_are_those_of_gkd_trainer(loss, steps, tmp_path):
    student = save_student(tmp_path / "student")
    found, batches = ours(tmp_path, student, loss, steps)
    assert len(found) == len(batches) == steps
    assert theirs(tmp_path / "theirs", student, loss, batches) == pytest.approx(found, abs=1e-5)
