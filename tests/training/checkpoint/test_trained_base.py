"""The base that is exported, checked, merged and written on the card is the one that was trained."""

import importlib.util
import json
import shutil

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.command_line import run_here
from support.covering import every_pair
from support.models.base_checkpoints import plain_model, tensors_in, write_base
from support.quickstart_runs import RESUME, train
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ligertune.errors import UserError
from ligertune.models.save import load_saved

SETTINGS = {"train.max_steps": 2, "train.learning_rate": 0.02, "checkpoint.save_strategy": "steps",
            "checkpoint.save_steps": 1, "data.datasets.0.max_samples": 8, "data.val_split": 0,
            "train.gradient_accumulation_steps": 1}  # fmt: skip
R, ALPHA = 4, 8
LORA = {"method.type": "lora", "method.lora_r": R, "method.lora_alpha": ALPHA}
METHODS = {
    "full": {},
    "freeze": {"method.type": "freeze", "method.trainable": ["model.layers.4"]},
    "lora": LORA,
    "dora": {**LORA, "method.use_dora": True},
}
TRAINED = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}  # on a CPU
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
IDS = torch.tensor([[1, 403, 407, 261, 378, 440, 265, 380]])


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits.float()


def distance(found, expected):
    return float((found - expected).norm() / expected.norm())


def merged_by_hand(weights, adapter, dtype):
    """Return W + s B A of each adapted weight, rounded once to `dtype`; with DoRA rows of the trained norm."""
    found = {name: weight.to(dtype) for name, weight in weights.items()}
    adapter = {name.replace(".default", ""): tensor for name, tensor in adapter.items()}
    for name in adapter:
        if not name.endswith("lora_A.weight"):
            continue
        path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        a, b = adapter[name].float(), adapter[name.replace("lora_A", "lora_B")].float()
        weight = found[f"{path}.weight"].float() + ALPHA / R * (b @ a)
        magnitude = name.replace("lora_A.weight", "lora_magnitude_vector")
        norms = adapter.get(magnitude, adapter.get(f"{magnitude}.weight"))
        if norms is not None:
            weight = weight * (norms.float() / weight.norm(dim=1))[:, None]
        found[f"{path}.weight"] = weight.to(dtype)
    return found


ROWS = every_pair(("float32", "float16", "bfloat16", "float8"), tuple(TRAINED), tuple(METHODS))
FAST = {("float32", "bfloat16", "lora")}


@pytest.mark.parametrize(
    ("stored", "dtype", "method"),
    [
        *[pytest.param(*row, id="-".join(row)) for row in sorted(FAST)],
        *[pytest.param(*row.values, id=row.id, marks=pytest.mark.slow) for row in ROWS if row.values not in FAST],
    ],
)
def test_every_export_computes_what_was_trained(stored, dtype, method, tmp_path):
    weights, trained = write_base(tmp_path / "base", stored), TRAINED[dtype]
    train(
        tmp_path, **SETTINGS, **METHODS[method], **{"model.model_name_or_path": tmp_path / "base", "model.dtype": dtype}
    )
    done = run_here("export", "run", "--out", "ex", "--check", cwd=tmp_path)
    assert done.code == 0, done.err
    done = run_here("export", "run", "--checkpoint", "step-1", "--out", "step", "--check", cwd=tmp_path)
    assert done.code == 0, done.err

    exported = tensors_in(tmp_path / "ex")
    assert {tensor.dtype for tensor in exported.values()} == {trained}
    config = json.loads((tmp_path / "ex" / "config.json").read_text())
    assert config["dtype"] == str(trained).removeprefix("torch.") and not config.get("quantization_config")
    if method == "freeze":
        for name in ("model.norm.weight", "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"):
            assert torch.equal(exported[name], weights[name].to(trained))
    if method in ("lora", "dora"):
        check_merged(exported, weights, tmp_path / "run" / "model" / "adapter_model.safetensors", trained)
        of_step = tensors_in(tmp_path / "step")
        check_merged(of_step, weights, tmp_path / "run" / "checkpoints" / "step-1" / "trained.safetensors", trained)
        truth = peft.PeftModel.from_pretrained(plain_model(weights, trained), tmp_path / "run" / "model").eval()
        served = AutoModelForCausalLM.from_pretrained(tmp_path / "ex").eval()
        assert distance(logits(served), logits(truth)) < TOLERANCE[trained]
        ours = load_saved(str(tmp_path / "run" / "model"), trust_remote_code=False)[0]  # of generate and chat
        assert ours.dtype is trained and distance(logits(ours), logits(truth)) < TOLERANCE[trained]


def check_merged(exported, weights, adapter, dtype):
    """Compare each merged weight with the formula. Sums in another order may round a few of them another way."""
    expected = merged_by_hand(weights, load_file(adapter), dtype)
    for name, weight in exported.items():
        if dtype is torch.bfloat16:
            assert (weight != expected[name]).float().mean() < 0.005, name
        torch.testing.assert_close(weight, expected[name], rtol=2**-7 if dtype is torch.bfloat16 else 2e-5, atol=1e-6)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A finished LoRA run in bfloat16 on a base in float32: its folder, with the base next to it."""
    folder = tmp_path_factory.mktemp("adapted")
    write_base(folder / "base")
    train(folder, **SETTINGS, **LORA, **{"model.model_name_or_path": folder / "base", "model.dtype": "bfloat16"})
    return folder


def test_layers_that_train_in_full_next_to_an_adapter_compute_in_the_dtype_of_the_base(tmp_path):
    """They are float32 while they train, and so are those of a block, which get bfloat16 from the block before."""
    block = {"method.type": "lora", "method.lora_modules_to_save": "[self_attn]", "model.dtype": "bfloat16"}
    write_base(tmp_path / "base", "float32")
    train(tmp_path, **SETTINGS, **block, **{"model.model_name_or_path": tmp_path / "base"})
    for command in (("export", "run", "--out", "ex", "--check"), ("generate", "run", "Once", "--max-new-tokens", "2")):
        done = run_here(*command, cwd=tmp_path)
        assert done.code == 0, done.err


def test_an_adapter_alone_knows_the_dtype_of_its_base(adapted, tmp_path):
    shutil.copytree(adapted / "run" / "model", tmp_path / "adapter")
    done = run_here("export", "adapter", "--out", "ex", "--check", "--prompt", "Once upon a time", cwd=tmp_path)
    assert done.code == 0, done.err
    assert {tensor.dtype for tensor in tensors_in(tmp_path / "ex").values()} == {torch.bfloat16}


def test_a_run_of_an_earlier_version_is_exported_in_the_dtype_of_its_plan(adapted, tmp_path):
    shutil.copytree(adapted / "run", tmp_path / "run")
    for path, key in ((tmp_path / "run/plan.json", "base"), (tmp_path / "run/model/ligertune.json", "base")):
        values = json.loads(path.read_text())
        del values[key]
        path.write_text(json.dumps(values))
    done = run_here("export", "run", "--out", "ex", "--check", cwd=tmp_path)
    assert done.code == 0, done.err
    assert {tensor.dtype for tensor in tensors_in(tmp_path / "ex").values()} == {torch.bfloat16}


def test_the_card_says_what_was_trained(adapted, tmp_path):
    done = run_here("export", adapted / "run", "--adapter", "--out", "ex", cwd=tmp_path)
    assert done.code == 0, done.err
    card = (tmp_path / "ex" / "README.md").read_text()
    fingerprint = json.loads((adapted / "run" / "plan.json").read_text())["base"]["fingerprint"]
    for row in ("| model | base |", "| dtype as trained | bfloat16 |", "| quantisation | none |", f"| {fingerprint} |"):
        assert row in card
    assert 'from_pretrained("base", dtype="bfloat16")' in card


@pytest.mark.parametrize("arguments", [(), ("--checkpoint", "step-1"), ("--adapter", "--check")])
def test_a_base_that_changed_since_is_not_merged_or_compared(arguments, adapted, tmp_path):
    shutil.copytree(adapted, tmp_path / "copy")
    for path in ("run/model/adapter_config.json", "run/resolved_recipe.yaml"):
        path = tmp_path / "copy" / path
        path.write_text(path.read_text().replace(str(adapted / "base"), str(tmp_path / "copy" / "base")))
    file = tmp_path / "copy" / "base" / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.2.mlp.up_proj.weight"][5, 7] += 1.0
    save_file(weights, file, {"format": "pt"})
    done = run_here("export", "copy/run", "--out", "ex", *arguments, cwd=tmp_path)
    assert done.code == 1 and "has changed since the training" in done.err and "Traceback" not in done.err
    assert arguments[:1] == ("--adapter",) or not (tmp_path / "ex").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [({"model.dtype": "float32"}, "bfloat16"), ({"other base": True}, "was trained on another base model")],
    ids=["dtype", "files"],
)
def test_a_run_resumes_with_the_base_that_it_was_started_with(change, words, adapted, tmp_path):
    shutil.copytree(adapted, tmp_path, dirs_exist_ok=True)
    (tmp_path / "run" / "report.json").unlink()
    shutil.rmtree(tmp_path / "run" / "model")
    file, dtype = tmp_path / "base" / "model.safetensors", change.get("model.dtype", "bfloat16")
    if "other base" in change:
        save_file({name: t * 1.5 for name, t in load_file(file).items()}, file, {"format": "pt"})
    again = {**SETTINGS, **LORA, **RESUME, "train.max_steps": 3, "train.lr_scheduler_type": "constant"}
    with pytest.raises(UserError, match=words):
        train(tmp_path, **again, **{"model.model_name_or_path": tmp_path / "base", "model.dtype": dtype})


def test_the_commit_of_a_base_from_the_hub_is_recorded_and_loaded_again(tmp_path, monkeypatch):
    """The branch moves on after the training, to a model with other weights."""
    repository, commits = tmp_path / "hub" / "models--tiny--llama", ("a" * 40, "b" * 40)
    for commit in commits:
        write_base(repository / "snapshots" / commit)
    file = repository / "snapshots" / commits[1] / "model.safetensors"
    save_file({name: t.flip(0).contiguous() for name, t in load_file(file).items()}, file, {"format": "pt"})
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commits[0])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    train(tmp_path, **SETTINGS, **LORA, **{"model.model_name_or_path": "tiny/llama", "model.dtype": "bfloat16"})
    (repository / "refs" / "main").write_text(commits[1])

    assert json.loads((tmp_path / "run/model/adapter_config.json").read_text())["revision"] == commits[0]
    for place, arguments in (("run", ()), ("run", ("--checkpoint", "step-1"))):
        out = tmp_path / f"ex{len(arguments)}"
        done = run_here("export", place, "--out", out, "--check", *arguments, cwd=tmp_path)
        assert done.code == 0, done.err
        card = (out / "README.md").read_text()
        assert f"| revision | {commits[0]} |" in card and "base_model: tiny/llama" in card
    weights = load_file(repository / "snapshots" / commits[0] / "model.safetensors")
    expected = merged_by_hand(weights, load_file(tmp_path / "run/model/adapter_model.safetensors"), torch.bfloat16)
    name = "model.layers.1.mlp.down_proj.weight"
    torch.testing.assert_close(tensors_in(tmp_path / "ex0")[name], expected[name], rtol=2**-7, atol=0.0)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize(
    "method",
    [
        {"method.type": "qlora"},
        {"method.type": "qlora", "method.bnb_4bit_quant_type": "fp4", "method.bnb_4bit_use_double_quant": False},
        {"method.type": "lora", "method.load_in_8bit": True},
    ],
    ids=["qlora", "fp4", "int8"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantised_methods(method, dtype, tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=512)).save_pretrained(tmp_path / "base")  # widths of bitsandbytes
    write_base(tmp_path / "names")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "names" / name, tmp_path / "base")
    train(tmp_path, **SETTINGS, **method, **{"model.model_name_or_path": tmp_path / "base", "model.dtype": dtype})
    for arguments in ((), ("--checkpoint", "step-1")):
        done = run_here("export", "run", "--out", f"ex{len(arguments)}", "--check", *arguments, cwd=tmp_path)
        assert done.code == 0, done.err
    assert {tensor.dtype for tensor in tensors_in(tmp_path / "ex0").values()} == {TRAINED[dtype]}
