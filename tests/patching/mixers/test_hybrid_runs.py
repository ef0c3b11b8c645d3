"""Runs of a tiny hybrid model: two ranks train as one process, and states learn to recall."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from support.command_line import RECIPE, losses
from support.forked_ranks import on_ranks
from support.models.tiny_families import save_tiny
from support.quickstart_runs import plan_run, train
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from ligertune.compare.comparison import kernels_in_use, load_settings, packed_alike
from ligertune.compare.side import SIDE_OF
from ligertune.errors import UserError
from ligertune.patching.patch import patch
from ligertune.planning.plan import Plan

TOKENIZER = str(RECIPE.parent / "stories260K")
LENGTHS = (20, 200)  # tokens to recall across: the second is learned within few steps after the first
STEPS = 500  # that the recall may take
LEARNED = 0.02  # cross entropy; guessing has log 4
SETTINGS = {"data.packing": True, "data.max_length": 256, "train.per_device_train_batch_size": 1,
            "train.global_batch_size": 2, "train.max_steps": 3}  # fmt: skip


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory) -> Path:
    return save_tiny("qwen3_5_text", tmp_path_factory.mktemp("hybrid"))


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_two_ranks_train_as_one_process(strategy, hybrid, tmp_path) -> None:
    """FSDP2 wraps the layers of the text, although the class also names those of a vision tower."""
    check_two_ranks(strategy, hybrid, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["nemotron_h", "kimi_linear", "falcon_h1", "lfm2"])
def test_two_ranks_train_other_hybrids(family, tmp_path) -> None:
    check_two_ranks("fsdp", save_tiny(family, tmp_path / "model"), tmp_path)


def check_two_ranks(strategy: str, hybrid: Path, tmp_path: Path) -> None:
    settings = {**SETTINGS, "model.model_name_or_path": str(hybrid), "model.tokenizer.path": TOKENIZER}
    train(tmp_path / "one", **settings)
    on_ranks(2, lambda rank: train(tmp_path / "two", **settings, **{"parallel.strategy": strategy}) and None)
    expected = losses(tmp_path / "one" / "run")
    assert len(expected) == 3 and losses(tmp_path / "two" / "run") == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "family, method",
    [
        ("nemotron_h", "lora"),
        ("kimi_linear", "full"),
        *(pytest.param(f, "full", marks=pytest.mark.slow) for f in ("nemotron_h", "lfm2", "falcon_h1")),
        *(pytest.param(f, "lora", marks=pytest.mark.slow) for f in ("kimi_linear", "lfm2", "falcon_h1")),
        pytest.param("inkling2_text", "full", marks=pytest.mark.slow),
    ],
)
def test_other_hybrids_train_packed_and_checkpointed(method, family, tmp_path) -> None:
    """With tied weights. Checkpointed layers get the documents in their second forward, too."""
    if family not in CONFIG_MAPPING:
        pytest.skip("this transformers does not have the family")
    model = {"model.model_name_or_path": str(save_tiny(family, tmp_path / "model")), "model.tokenizer.path": TOKENIZER}
    attention = "eager" if family == "inkling2_text" else "auto"  # no other computes its attention sinks
    settings = {**SETTINGS, **model, "method.type": method, "model.attn_implementation": attention}
    for name, more in (("kept", {}), ("checkpointed", {"train.gradient_checkpointing": True})):
        train(tmp_path / name, **settings, **more)
    expected = losses(tmp_path / "kept" / "run")
    assert len(expected) == 3 and losses(tmp_path / "checkpointed" / "run") == pytest.approx(expected, rel=1e-6)


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_adapters_train_on_four_bits(hybrid, tmp_path) -> None:
    """The check for leaks evaluates the model first, where bitsandbytes would pack its weights on some CPUs."""
    four_bits = {"method.type": "qlora", "train.learning_rate": 1e-2}
    train(tmp_path, **SETTINGS, **four_bits, **{"model.model_name_or_path": hybrid, "model.tokenizer.path": TOKENIZER})
    first, *_, last = losses(tmp_path / "run")
    assert last < first


def recall_texts(count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Return texts (count, length + 4): a mark, one of four values, words without meaning, another mark, the value."""
    values = torch.randint(4, 8, (count,), generator=generator)
    ids = torch.randint(10, 16, (count, length + 4), generator=generator)
    ids[:, 0] = 8
    ids[:, 1] = values
    ids[:, -2] = 9
    ids[:, -1] = values
    return ids


def test_a_value_is_recalled_across_200_tokens() -> None:
    """Only the states of recurrences reach that far: there is no attention, and the convolution sees four tokens."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_5_text", vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        layer_types=["linear_attention"], num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            nn.init.constant_(parameter, -3.0)  # states that forget slowly, as some of a trained model do
    patch(model, loss="torch")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)

    def answers(ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids[:, :-1], use_cache=False).logits[:, -1]

    for length in LENGTHS:
        for _ in range(STEPS):
            ids = recall_texts(8, length, generator)
            loss = cross_entropy(answers(ids), ids[:, -1])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if loss < LEARNED:
                break
    ids = recall_texts(100, LENGTHS[-1], generator)
    with torch.no_grad():
        right = answers(ids).argmax(-1) == ids[:, -1]
    assert right.float().mean() > 0.95


def plan_of(folder: Path, model: Path, **changes: object) -> Plan:
    settings = {"model.model_name_or_path": str(model), "model.tokenizer.path": TOKENIZER, "data.packing": "auto"}
    return plan_run(folder, **{**settings, **changes}).plan


def test_packing_is_on_where_our_kernels_keep_documents_apart(hybrid, tmp_path) -> None:
    assert plan_of(tmp_path, hybrid).rows.kind == "packed"


@pytest.mark.parametrize("names", [["conv"], ["conv", "in_proj"], ".*conv.conv"])
def test_an_adapter_of_a_convolution_is_refused(names, tmp_path) -> None:
    """The mixer reads the convolution's weight and does not call it, so PEFT's adapter would get no gradient."""
    model = save_tiny("lfm2", tmp_path / "model")
    with pytest.raises(UserError, match="is the convolution of a Lfm2ShortConv, which reads its weight"):
        plan_of(tmp_path, model, **{"method.type": "lora", "method.lora_r": 64, "method.lora_target_modules": names})


def test_a_model_without_attention_packs(tmp_path) -> None:
    assert plan_of(tmp_path, save_tiny("mamba2", tmp_path / "model")).rows.kind == "packed"


def test_packing_is_off_where_transformers_carries_a_state(hybrid, tmp_path) -> None:
    plan = plan_of(tmp_path, hybrid, **{"kernels.mixer": False})
    assert plan.rows.kind != "packed"
    why = "Qwen3_5GatedDeltaNet layers carry state from one document of a packed row into the next"
    why += ". No kernel keeps them apart: kernels are switched off; write kernels.enabled: true and kernels.mixer: true"
    assert any(note.startswith(f"packing is off: {why}") for note in plan.notes)
    with pytest.raises(UserError, match=f"data.packing: {why}"):
        plan_of(tmp_path, hybrid, **{"kernels.mixer": False, "data.packing": True})


def test_medusa_heads_are_refused_before_training(hybrid, tmp_path) -> None:
    with pytest.raises(UserError, match="Qwen3_5GatedDeltaNet layers of the model carry a state"):
        plan_of(tmp_path, hybrid, task="medusa")


@pytest.mark.parametrize("names, packing", [(("with", "without"), False), (("with", "no-rope"), "auto")])
def test_sides_of_a_comparison_pack_alike(names, packing, hybrid) -> None:
    overrides = [f"model.model_name_or_path={hybrid}", f"model.tokenizer.path={TOKENIZER}", "data.packing=auto"]
    (setting,) = load_settings(RECIPE, overrides, None)
    said: list[str] = []
    alike = packed_alike(setting, [SIDE_OF[name] for name in names], said.append)
    assert alike.recipe.data.packing == packing
    told = ["packing is off on all sides: in Hugging Face, Qwen3_5GatedDeltaNet layers carry state between documents"]
    assert said == (told if packing is False else [])
    assert "mixer" in kernels_in_use(setting.recipe, "sm90")
