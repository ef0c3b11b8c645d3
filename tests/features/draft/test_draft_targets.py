"""Draft heads for targets in 4 bits and with adapters, compared with dense copies of the same weights."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.command_line import overrides, run_here
from support.quickstart_runs import ALPACA_ROWS, ONE_ROW
from support.quickstart_runs import train as train_quickstart
from support.tasks.draft_runs import DRAFT, plan_draft, train_draft
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from ligertune.errors import UserError
from ligertune.features.draft.decode import measure_run
from ligertune.features.draft.files.draft_files import read_draft_files
from ligertune.features.draft.recipe import DraftSpec
from ligertune.models.load import whole_model
from ligertune.models.read_config import read_config
from ligertune.models.save import load_trained_adapter, merge_saved_adapter, saved_spec
from ligertune.planning.plan import Plan
from ligertune.planning.saved_model import trained_base
from ligertune.recipe import load_recipe
from ligertune.training.resolve import plan_for

pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install bitsandbytes")

SHORT = {
    "train.max_steps": 2,
    "train.per_device_train_batch_size": 2,
    "logging.logging_steps": 1,
    "data.datasets.0.max_samples": 20,
    "data.max_length": 64,
    "eval.eval_strategy": "no",
    "checkpoint.save_strategy": "no",
}
FOUR_BITS = {"draft.load_in_4bit": True}


def draft(folder: Path, model: Path, **changes: object) -> list[float]:
    """Return the losses of a short run with this target."""
    return train_draft(folder, **SHORT, **{"model.model_name_or_path": model, **changes})[0]


def save(model: torch.nn.Module, tokenizer: Path, folder: Path) -> Path:
    """Write a dense model and a tokenizer to a folder."""
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(quickstart) -> Path:
    return quickstart / "stories260K"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Two runs whose models are adapters, on dense weights and on weights in 4 bits."""
    folders = {}
    for method in ("lora", "qlora"):
        folder = tmp_path_factory.mktemp(method)
        settings = {"method.type": method, "method.lora_r": 4, "train.learning_rate": 0.02, **ONE_ROW}
        train_quickstart(folder, **settings, **ALPACA_ROWS)
        folders[method] = folder / "run"
    return folders


def dense_in_four_bits(base: Path, folder: Path) -> Path:
    """Write a model with the weights that NF4 represents."""
    spec = saved_spec(str(base), trust_remote_code=False)
    return save(whole_model(spec, read_config(spec), trained_in="float32", stored_as="nf4"), base, folder)


def test_a_head_trains_on_the_states_of_weights_in_4_bits(base, tmp_path) -> None:
    expected = draft(tmp_path / "dense", dense_in_four_bits(base, tmp_path / "copy"))
    found = draft(tmp_path / "four", base, **FOUR_BITS)
    assert found == pytest.approx(expected, rel=1e-5)
    assert found != pytest.approx(draft(tmp_path / "plain", base), rel=1e-4)
    files = read_draft_files(tmp_path / "four" / "draft" / "speculators", read_config(load_recipe(DRAFT).model))
    assert files.tensors["fc.weight"].dtype is torch.float32
    target = AutoModelForCausalLM.from_pretrained(base)
    assert torch.equal(files.embedding, target.get_input_embeddings().weight)


def test_a_target_that_is_stored_in_4_bits_is_used_as_it_is(base, tmp_path) -> None:
    quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=quantised, dtype=torch.float32)
    stored = save(model, base, tmp_path / "stored")
    assert draft(tmp_path / "run", stored) == pytest.approx(draft(tmp_path / "four", base, **FOUR_BITS), rel=1e-5)
    planned = {
        name: plan_draft(tmp_path / name, **SHORT, **{"model.model_name_or_path": model, **changes}).plan
        for name, model, changes in (("a", stored, {}), ("b", base, FOUR_BITS))
    }
    assert planned["a"].bytes == planned["b"].bytes
    with pytest.raises(UserError, match="quantises weights in 16 or 32 bits, and those of"):
        draft(tmp_path / "twice", stored, **FOUR_BITS)


def test_several_processes_hold_whole_copies_of_4_bit_weights(tmp_path) -> None:
    def plan(**changes: object) -> Plan:
        settings = {**SHORT, **FOUR_BITS, "checkpoint.output_dir": tmp_path / "run", **changes}
        return plan_for(load_recipe(DRAFT, overrides=overrides(settings)[1::2]), for_show=True, processes=2).plan

    assert plan().strategy == "ddp"
    with pytest.raises(UserError, match=r"parallel.strategy is fsdp, and weights in 4 bits .* are not sharded"):
        plan(**{"parallel.strategy": "fsdp"})


@pytest.mark.parametrize("kind", ["adapter", pytest.param("four bits", marks=pytest.mark.slow)])
def test_measurements_decode_with_the_target_that_the_head_was_trained_on(kind, runs, tmp_path, monkeypatch) -> None:
    """A head that knows nothing drafts for it: texts are those of the target alone, and not those of the base."""
    for name, few in (("PROMPTS", 1), ("NEW_TOKENS", 6), ("TEXTS", 2)):
        monkeypatch.setattr(measure_run, name, few)
    target = {"adapter": {"model.model_name_or_path": runs["lora"]}, "four bits": FOUR_BITS}[kind]
    settings = {**SHORT, "data.val_split": 0.2, **target}
    train_draft(tmp_path / "run", **settings)
    options = overrides({**settings, "checkpoint.output_dir": tmp_path / "run"})
    found = json.loads(run_here("draft", DRAFT, "--measure", "--json", *options, cwd=tmp_path).out)
    assert found["chain"]["identical"] == found["chain"]["prompts"] > 0
    of_base = overrides({**SHORT, "data.val_split": 0.2, "checkpoint.output_dir": tmp_path / "run"})
    other = json.loads(run_here("draft", DRAFT, "--measure", "--json", *of_base, cwd=tmp_path).out)
    assert other["sampled chain"]["expected"] != pytest.approx(found["sampled chain"]["expected"], rel=1e-4)


def test_cached_states_of_another_target_are_refused(base, runs, tmp_path) -> None:
    cached = {"draft.cache": tmp_path / "cache"}
    draft(tmp_path / "first", base, **cached)
    for changes in ({"model": base, **FOUR_BITS}, {"model": runs["lora"]}):
        with pytest.raises(UserError, match=r"another target: .*weights"):
            draft(tmp_path / "other", **changes, **cached)


def test_the_plan_counts_4_bit_weights_and_the_largest_one_dequantised(base, tmp_path) -> None:
    dense = plan_draft(tmp_path / "dense", **SHORT).plan
    four = plan_draft(tmp_path / "four", **SHORT, **FOUR_BITS).plan
    layers, hidden, mlp, keys = 5, 64, 172, 32
    quantised = layers * (2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * mlp)
    bits = 4 + 8 / 64 + 32 / (64 * 256)
    assert dense.bytes.weights - four.bytes.weights == pytest.approx(quantised * (4 - bits / 8), abs=1)
    assert four.memory.workspace - dense.memory.workspace == 4 * hidden * mlp
    assert (four.bytes.gradients, four.bytes.trained) == (dense.bytes.gradients, dense.bytes.trained)


@pytest.mark.parametrize(
    ("recipe", "model"),
    [
        ("llama-3.1-8b-24gb.yaml", "Llama-3.1-8B"),
        pytest.param("qwen3-8b-24gb.yaml", "Qwen3-8B", marks=pytest.mark.slow),
    ],
)
def test_the_recipes_for_24_gb_are_planned_below_24_gib(recipe, model, corpus, base, tmp_path) -> None:
    """Packed rows of 8,192 tokens and seven steps, of which all states are recomputed or none."""
    settings = {
        "model.model_name_or_path": corpus / "model_configs" / model,
        "model.init": "random",
        "model.tokenizer.path": base,
        "data.datasets.0.path": load_recipe(DRAFT).data.datasets[0].path,
        "data.val_split": 0,
        "eval.eval_strategy": "no",
        "checkpoint.load_best_model_at_end": False,
        "checkpoint.output_dir": tmp_path / "run",
    }

    def peak(**changes: object) -> float:
        values = overrides({**settings, **changes})[1::2]
        plan = plan_for(load_recipe(DRAFT.parent / recipe, overrides=values), for_show=True, memory_gib=24).plan
        assert (plan.largest_batch.rows, plan.largest_batch.row_length) == (1, 8192)
        assert plan.build.section(DraftSpec).steps == 7
        return plan.peak.total / 2**30

    assert peak() < 14
    assert peak(**{"train.gradient_checkpointing": False}) < 22
    # 6.95e9 weights of 2 bytes, without 4.127 bits each, and the largest of them dequantised
    assert peak(**{"draft.load_in_4bit": False}) - peak() == pytest.approx(9.6, abs=0.1)


@pytest.mark.parametrize("place", [".", pytest.param("model", marks=pytest.mark.slow)])
def test_the_target_of_an_adapter_is_the_merged_model(place, runs, base, tmp_path) -> None:
    folder = runs["lora"] / "model"
    merged, _, _ = merge_saved_adapter(folder, trained_base(folder), trust_remote_code=False)
    expected = draft(tmp_path / "merged", save(merged, folder, tmp_path / "copy"))
    found = draft(tmp_path / "run", runs["lora"] / place)
    assert found == pytest.approx(expected, rel=1e-5)
    assert found != pytest.approx(draft(tmp_path / "base", base), rel=1e-4)


def test_adapters_on_4_bit_weights_stay_in_the_layers(runs, base, tmp_path) -> None:
    """The target is what QLoRA trained, with and without load_in_4bit."""
    folder = runs["qlora"] / "model"
    merged, _, _ = merge_saved_adapter(folder, trained_base(folder), trust_remote_code=False)
    expected = draft(tmp_path / "merged", save(merged, folder, tmp_path / "copy"))
    assert draft(tmp_path / "run", runs["qlora"]) == pytest.approx(expected, rel=1e-5)
    assert draft(tmp_path / "same", runs["qlora"], **FOUR_BITS) == pytest.approx(expected, rel=1e-5)


def test_adapters_that_4_bit_weights_cannot_keep_are_refused(runs, tmp_path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(runs["qlora"] / "model", copied)
    record = json.loads((copied / "ligertune.json").read_text())
    record["base"]["residual_of"] = "pissa"
    (copied / "ligertune.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="was trained with init_lora_weights: pissa on weights of 4 bits") as caught:
        plan_draft(tmp_path / "run", **SHORT, **{"model.model_name_or_path": copied})
    assert caught.value.exit_code == 2
    adapter = {"model.model_name_or_path": train_output_head(tmp_path)}
    with pytest.raises(UserError, match="changes the embedding or the output head, and on quantised"):
        plan_draft(tmp_path / "run", **SHORT, **adapter, **FOUR_BITS)


def train_output_head(folder: Path) -> Path:
    """Return a run whose adapter has an output head of its own."""
    head = {"method.type": "lora", "method.lora_r": 4, "method.lora_modules_to_save": "[lm_head]", "train.max_steps": 1}
    train_quickstart(folder / "head", **head, **ONE_ROW)
    return folder / "head" / "run"


@pytest.mark.slow
def test_an_output_head_of_an_adapter_is_merged_on_dense_weights(tmp_path) -> None:
    run = train_output_head(tmp_path)
    merged, _, _ = merge_saved_adapter(run / "model", None, trust_remote_code=False)
    expected = draft(tmp_path / "merged", save(merged, run / "model", tmp_path / "copy"))
    assert draft(tmp_path / "run", run) == pytest.approx(expected, rel=1e-5)


def test_an_adapter_that_names_no_base_is_refused(runs, tmp_path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(runs["lora"] / "model", copied)
    config = json.loads((copied / "adapter_config.json").read_text())
    (copied / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": None}))
    with pytest.raises(UserError, match="does not name the model that its adapter belongs to"):
        plan_draft(tmp_path / "run", **SHORT, **{"model.model_name_or_path": copied})


def test_an_adapter_of_dense_weights_is_added_to_those_in_4_bits(runs, base, tmp_path) -> None:
    folder = runs["lora"] / "model"
    spec = saved_spec(str(folder), trust_remote_code=False)
    dense = whole_model(spec, read_config(spec), trained_in="float32", stored_as="nf4")
    merged = load_trained_adapter(dense, folder, None).merge_and_unload()
    expected = draft(tmp_path / "merged", save(merged, folder, tmp_path / "copy"))
    assert draft(tmp_path / "run", runs["lora"], **FOUR_BITS) == pytest.approx(expected, rel=1e-5)
    plans = [
        plan_draft(tmp_path / "plan", **SHORT, **FOUR_BITS, **{"model.model_name_or_path": model}).plan
        for model in (base, runs["lora"])
    ]
    adapter = sum(one.numel() for one in load_file(folder / "adapter_model.safetensors").values())
    assert plans[1].bytes.weights - plans[0].bytes.weights == 4 * adapter
    assert plans[1].bytes.trained == plans[0].bytes.trained
