"""Trainers of other libraries: a patched model has the losses of an unpatched one in each of them."""

import functools
import json
from collections.abc import Callable

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from support.command_line import ROOT
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

from ligertune.patching.host_copy import RowSearch
from ligertune.patching.patch import patch

QUICKSTART = ROOT / "configs" / "quickstart"
STEPS = 3
SAME = 2e-4  # losses are logged with four digits
SETTINGS = {
    "max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_steps": 1,
    "save_strategy": "no", "report_to": "none", "seed": 3, "use_cpu": True, "disable_tqdm": True, "bf16": False,
}  # fmt: skip
LORA = LoraConfig(target_modules="all-linear", r=4, lora_alpha=8, lora_dropout=0.0, task_type="CAUSAL_LM")
Wrap = Callable[[PreTrainedModel], torch.nn.Module]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "stories260K")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    with open(QUICKSTART / "dolly_short.jsonl", encoding="utf-8") as file:
        found = [json.loads(line) for line in file][:24]
    return [{"prompt": row["instruction"][:60] + "\n", "completion": row["output"][:60]} for row in found]


def unpatched(model: PreTrainedModel) -> torch.nn.Module:
    return model


def kernels(model: PreTrainedModel, **options: object) -> torch.nn.Module:
    patch(model, **options)
    return model


def layers_only(model: PreTrainedModel) -> torch.nn.Module:
    return kernels(model, loss="torch")


def recomputing(model: PreTrainedModel) -> torch.nn.Module:
    return kernels(model, recompute=True)


def adapters(model: PreTrainedModel) -> torch.nn.Module:
    torch.manual_seed(5)
    return get_peft_model(model, LORA)


def patched_before_peft(model: PreTrainedModel) -> torch.nn.Module:
    return adapters(kernels(model))


def patched_after_peft(model: PreTrainedModel) -> torch.nn.Module:
    return kernels(adapters(model))


def load(wrap: Wrap) -> torch.nn.Module:
    torch.manual_seed(0)
    return wrap(AutoModelForCausalLM.from_pretrained(QUICKSTART / "stories260K", dtype=torch.float32))


def logged(trainer: Trainer, *names: str) -> list[float]:
    """Train, and return what was logged under these names in each step."""
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if names[0] in entry]
    assert len(entries) == STEPS
    return [entry[name] for entry in entries for name in names]


def hf_trainer(model, tokenizer, rows, folder) -> list[float]:
    def tokenize(row):
        prompt, answer = (tokenizer(row[name])["input_ids"] for name in ("prompt", "completion"))
        return {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}

    data = Dataset.from_list([tokenize(row) for row in rows])
    arguments = TrainingArguments(folder, gradient_accumulation_steps=2, **SETTINGS)
    return logged(Trainer(model, arguments, DataCollatorForSeq2Seq(tokenizer), data), "loss", "grad_norm")


def trl_sft(model, tokenizer, rows, folder) -> list[float]:
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(folder, max_length=64, gradient_checkpointing=False, **SETTINGS)
    data = Dataset.from_list(rows)
    return logged(SFTTrainer(model, config, train_dataset=data, processing_class=tokenizer), "loss", "grad_norm")


def trl_dpo(model, tokenizer, rows, folder) -> list[float]:
    from trl import DPOConfig, DPOTrainer

    pairs = [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": row["completion"][::-1]} for row in rows
    ]
    config = DPOConfig(folder, max_length=64, gradient_checkpointing=False, **SETTINGS)
    trainer = DPOTrainer(model, args=config, train_dataset=Dataset.from_list(pairs), processing_class=tokenizer)
    return logged(trainer, "loss", "grad_norm")


def trl_grpo(model, tokenizer, rows, folder) -> list[float]:
    from trl import GRPOConfig, GRPOTrainer

    def letters(completions, **kwargs):
        return [float(text.count("e") + len(text) % 7) for text in completions]

    config = GRPOConfig(
        folder, num_generations=2, max_completion_length=12, beta=0.1, gradient_checkpointing=False, **SETTINGS
    )
    data = Dataset.from_list([{"prompt": row["prompt"]} for row in rows])
    trainer = GRPOTrainer(model, letters, args=config, train_dataset=data, processing_class=tokenizer)
    return logged(trainer, "loss", "reward", "grad_norm")


def lightning_trainer(model, tokenizer, rows, folder) -> list[float]:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.losses = model.train(), []

        def training_step(self, batch):
            loss = self.model(**batch).loss
            self.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 1e-3)

    texts = [tokenizer(row["prompt"] + row["completion"])["input_ids"] for row in rows]
    batches = [{"input_ids": ids, "labels": list(ids)} for ids in texts]
    loader = torch.utils.data.DataLoader(batches, 4, collate_fn=DataCollatorForSeq2Seq(tokenizer))
    module = Module()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    lightning.Trainer(accelerator="cpu", devices=1, max_steps=STEPS, default_root_dir=folder, **quiet).fit(
        module, loader
    )
    assert len(module.losses) == STEPS
    return module.losses


CASES = [
    (hf_trainer, kernels), (hf_trainer, recomputing),
    (hf_trainer, patched_before_peft), (hf_trainer, patched_after_peft),
    (lightning_trainer, kernels), (lightning_trainer, patched_before_peft), (lightning_trainer, patched_after_peft),
    (trl_sft, layers_only), (trl_sft, kernels), (trl_sft, patched_before_peft), (trl_sft, patched_after_peft),
    (trl_dpo, kernels), (trl_dpo, patched_before_peft), (trl_dpo, patched_after_peft),
    (trl_grpo, kernels), (trl_grpo, patched_before_peft), (trl_grpo, patched_after_peft),
]  # fmt: skip
# The others are slow: test_examples trains with the HF Trainer and with TRL's SFTTrainer.
FAST = [(hf_trainer, patched_before_peft), (trl_dpo, kernels), (trl_grpo, kernels)]
PACKAGES = {lightning_trainer: "lightning", trl_sft: "trl", trl_dpo: "trl", trl_grpo: "trl"}


@pytest.fixture(scope="module")
def expected(tokenizer, rows, tmp_path_factory) -> Callable[..., list[float]]:
    """What a trainer logs for the unpatched model, bare or with adapters."""

    @functools.cache
    def run(trainer, wrap) -> list[float]:
        return trainer(load(wrap), tokenizer, rows, str(tmp_path_factory.mktemp("plain")))

    return run


@pytest.mark.parametrize(
    ("trainer", "wrap"),
    [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in CASES],
    ids=lambda value: value.__name__,
)
def test_a_patched_model_has_the_losses_of_the_unpatched_one(trainer, wrap, tokenizer, rows, expected, tmp_path):
    pytest.importorskip(PACKAGES.get(trainer, "transformers"))
    plain = expected(trainer, adapters if "peft" in wrap.__name__ else unpatched)
    found = trainer(load(wrap), tokenizer, rows, str(tmp_path))
    assert found == pytest.approx(plain, rel=SAME, abs=SAME)
    assert len(set(plain)) >= STEPS  # it has trained: losses and gradient norms change


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [kernels, patched_before_peft, patched_after_peft], ids=lambda wrap: wrap.__name__)
def test_the_trainer_computes_only_the_rows_that_have_a_label(wrap, tokenizer, rows, expected, tmp_path, monkeypatch):
    """The search runs here as on a GPU; the prompts, about half of the tokens, have no labels.

    TRL's SFTTrainer replaces the output head and computes the loss in it.
    """
    monkeypatch.setattr("ligertune.patching.host_copy.MIN_PRODUCTS", 0)
    monkeypatch.setattr("ligertune.patching.host_copy.DEVICES", ("cpu",))
    search, shares = RowSearch.rows, []

    def watched(self: RowSearch, labels: torch.Tensor, **options: int) -> torch.Tensor:
        found = search(self, labels, **options)
        shares.append(len(found) / labels.numel())
        return found

    monkeypatch.setattr(RowSearch, "rows", watched)
    losses = hf_trainer(load(wrap), tokenizer, rows, str(tmp_path))
    plain = expected(hf_trainer, adapters if "peft" in wrap.__name__ else unpatched)
    assert losses == pytest.approx(plain, rel=SAME, abs=SAME)
    assert len(shares) >= STEPS and max(shares) < 0.8
