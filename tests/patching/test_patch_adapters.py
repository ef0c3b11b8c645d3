"""`patch` fuses the LoRA adapters of a PEFT model, which then trains as without it."""

import copy
import sys
from pathlib import Path

import peft
import pytest
import torch
from datasets import Dataset
from peft.tuners.lora import Linear as LoraLinear
from support.models import tiny_models
from torch import nn
from transformers import AutoTokenizer, Trainer, TrainingArguments

from ligertune.patching.deferred_logits import loss_counts
from ligertune.patching.lora.fused_lora import FusedLora, LoraLossHead
from ligertune.patching.patch import PatchReport, patch, unpatch
from ligertune.planning.plan import KernelLine

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LAYERS = 2 * len(TARGETS)
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def adapted(base: nn.Module | None = None, *, head: bool = False, **options: object) -> peft.PeftModel:
    torch.manual_seed(1)
    base = tiny_models.make("llama") if base is None else base
    options = {"r": 4, "target_modules": [*TARGETS, *(["lm_head"] if head else [])], **options}
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    randomise(model)
    return model.train()


def randomise(model: nn.Module) -> None:
    """Give the adapters weights that are not zero."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = (0.1 * torch.randn(parameter.shape, generator=generator)).to(parameter)


def outcome(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the loss and every gradient of a batch."""
    model.zero_grad()
    torch.manual_seed(2)  # of a dropout
    loss = model(**tiny_models.batch(), use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.requires_grad}}


def row_of(report: PatchReport, kernel: str = "lora_linear") -> KernelLine | None:
    return next((row for row in report.rows if row.kernel == kernel), None)


@pytest.fixture
def calls(monkeypatch):
    """The calls of peft's own forward."""
    found = []
    forward = LoraLinear.forward
    monkeypatch.setattr(LoraLinear, "forward", lambda self, *a, **k: found.append(self) or forward(self, *a, **k))
    return found


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("first", [False, True], ids=["patched after peft", "patched before and after"])
def test_loss_and_gradients_of_a_patched_peft_model_equal_pefts(first, head, recompute, calls):
    expected = outcome(adapted(head=head))
    calls.clear()
    base = tiny_models.make("llama")
    if first:
        patch(base, recompute=recompute)
    model = adapted(base, head=head)
    report = patch(model, recompute=recompute)
    torch.testing.assert_close(outcome(model), expected, **CLOSE)
    assert not calls and row_of(report) == KernelLine("lora_linear", LAYERS + head, 0, "")
    assert loss_counts(model).fused == 1 and not loss_counts(model).materialised


@pytest.mark.parametrize("loss", ["torch", "cross_entropy"])
def test_an_adapted_head_is_fused_as_other_layers_where_it_makes_logits(loss, calls):
    expected = outcome(adapted(head=True))
    calls.clear()
    model = adapted(head=True)
    assert row_of(patch(model, loss=loss)).applied == LAYERS + 1
    torch.testing.assert_close(outcome(model), expected, **CLOSE)
    assert not calls


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"use_dora": True}, "is more than a low-rank term"), ({"lora_bias": True}, "is more than a low-rank term")],
    ids=str,
)
def test_the_report_says_where_pefts_own_code_runs(options, reason):
    expected = outcome(adapted(**options))
    model = adapted(**options)
    row = row_of(patch(model))
    assert (row.applied, row.left) == (0, LAYERS) and reason in row.note
    torch.testing.assert_close(outcome(model), expected, **CLOSE)


def test_several_active_adapters_and_switched_off_ones_compute_what_peft_computes():
    found = []
    for patched in (False, True):
        model = adapted()
        if patched:
            patch(model)
        with model.disable_adapter(), torch.no_grad():
            off = model(**tiny_models.batch()).loss
        model.add_adapter("second", peft.LoraConfig(r=2, target_modules=TARGETS))
        model.base_model.set_adapter(["default", "second"])
        randomise(model)
        found.append({"off": off, **outcome(model)})
    torch.testing.assert_close(found[1], found[0], **CLOSE)


def test_adapters_are_counted_once_switched_off_and_restored(tmp_path):
    model = adapted(head=True)
    classes = [type(module) for module in model.modules()]
    off = row_of(patch(model, lora=False, loss="torch"))
    assert (off.applied, off.left) == (0, LAYERS + 1) and "switched off" in off.note
    unpatch(model)
    patch(model)
    again = patch(model)
    assert row_of(again) == KernelLine("lora_linear", LAYERS + 1, 0, f"{LAYERS + 1} patched before")
    assert row_of(patch(model, lora=False)) == row_of(again)
    assert isinstance(model.get_output_embeddings(), LoraLossHead)
    assert not unpatch(model) and [type(module) for module in model.modules()] == classes
    assert row_of(patch(tiny_models.make("llama"))) is None  # no adapters, no row


def test_a_patched_model_is_copied_saved_and_merged_as_before(tmp_path):
    usual = adapted(head=True)
    model = adapted(head=True)
    patch(model)
    copied = copy.deepcopy(model)
    torch.testing.assert_close(outcome(copied), outcome(usual), **CLOSE)
    model.save_pretrained(tmp_path / "patched")
    usual.save_pretrained(tmp_path / "usual")
    files = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("patched", "usual")]
    assert files[0] == files[1]
    loaded = peft.PeftModel.from_pretrained(tiny_models.make("llama"), tmp_path / "patched", is_trainable=True)
    patch(loaded)
    torch.testing.assert_close(outcome(loaded.train()), outcome(usual), **CLOSE)
    ids = tiny_models.batch()["input_ids"]
    with torch.no_grad():
        expected = usual.eval()(ids).logits
        torch.testing.assert_close(model.eval()(ids).logits, expected, **CLOSE)
        torch.testing.assert_close(model.merge_and_unload()(ids).logits, expected, rtol=1e-4, atol=1e-5)


def test_adapters_added_after_patch_work_and_another_call_fuses_them(calls):
    base = tiny_models.make("llama")
    patch(base)
    model = adapted(base)
    expected = outcome(model)
    assert len(calls) == LAYERS
    assert row_of(patch(model)) == KernelLine("lora_linear", LAYERS, 0, "")
    torch.testing.assert_close(outcome(model), expected, **CLOSE)
    assert len(calls) == LAYERS


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_keeps_the_gradients(reentrant):
    expected = outcome(adapted())
    model = adapted()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    patch(model)
    torch.testing.assert_close(outcome(model), expected, **CLOSE)


def test_a_compiled_model_trains_as_peft():
    expected = outcome(adapted(tiny_models.make("llama", num_hidden_layers=1), head=True))
    model = adapted(tiny_models.make("llama", num_hidden_layers=1), head=True)
    patch(model)
    found = outcome(torch.compile(model, backend="eager"))
    found = {name.removeprefix("_orig_mod."): value for name, value in found.items()}
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("head", [False, True])
def test_a_bfloat16_model_without_autocast_keeps_float32_adapters(head):
    """Peft multiplies by them in float32, and rounds the sum."""
    found = []
    for patched in (False, True):
        model = adapted(tiny_models.make("llama").bfloat16(), head=head)
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
        if patched:
            patch(model, rope=False, norm=False, mlp=False)
        found.append(outcome(model))
    assert found[1]["loss"].item() == pytest.approx(found[0]["loss"].item(), rel=1e-5)
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name].float(), expected.float(), rtol=2e-2, atol=2e-4)


def test_a_layer_alone_is_patched():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0", "1"]))
    randomise(model)
    x = torch.randn(3, 8)
    expected = model(x)
    assert row_of(patch(model)).applied == 2
    assert sum(isinstance(module, FusedLora) for module in model.modules()) == 2
    torch.testing.assert_close(model(x), expected, **CLOSE)


def test_patch_does_not_import_peft(monkeypatch):
    for name in list(sys.modules):
        if name.startswith(("peft", "ligertune.patching.lora", "ligertune.patching.experts.expert_lora")):
            monkeypatch.delitem(sys.modules, name)
    patch(tiny_models.make("llama"))
    assert "peft" not in sys.modules


ARGUMENTS = {
    "max_steps": 3,
    "per_device_train_batch_size": 2,
    "learning_rate": 0.1,
    "optim": "sgd",  # Adam divides by the gradient's size, and so enlarges the rounding of tiny gradients
    "logging_steps": 1,
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
}


def trained(trainer: Trainer) -> list[torch.Tensor]:
    """Return the losses, and the adapters after the last step."""
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [torch.tensor(losses), *(p.detach().clone() for p in trainer.model.parameters() if p.requires_grad)]


def test_trainer_trains_as_with_plain_peft(tmp_path, calls):
    batch = tiny_models.batch(rows=6)
    rows = [{name: values[i] for name, values in batch.items()} for i in range(6)]
    found = []
    for patched in (False, True):
        model = adapted(head=True)
        if patched:
            patch(model)
        calls.clear()
        found.append(trained(Trainer(model, TrainingArguments(str(tmp_path), **ARGUMENTS), train_dataset=rows)))
        assert bool(calls) is not patched
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


def test_sft_trainer_of_trl_trains_as_with_plain_peft(tmp_path, calls):
    trl = pytest.importorskip("trl")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "configs" / "quickstart" / "stories260K")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    data = Dataset.from_list([{"prompt": f"Story {i}:", "completion": " Once upon a time."} for i in range(6)])
    found = []
    for patched in (False, True):
        torch.manual_seed(4)
        config = trl.SFTConfig(str(tmp_path), max_length=64, **ARGUMENTS)
        lora = peft.LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM")
        base = tiny_models.make("llama", vocab_size=len(tokenizer))
        trainer = trl.SFTTrainer(base, config, train_dataset=data, processing_class=tokenizer, peft_config=lora)
        if patched:
            patch(trainer.model, loss="torch")
        calls.clear()
        found.append(trained(trainer))
        assert bool(calls) is not patched
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
