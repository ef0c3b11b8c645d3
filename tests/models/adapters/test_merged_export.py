"""`export` of adapters that users made with PEFT: the merged model has the logits of PeftModel, or PEFT's reason."""

import shutil
import warnings
from pathlib import Path

import peft
import pytest
import torch
import transformers
from support.command_line import run_here
from support.covering import every_pair
from support.models import tiny_models
from support.models.hostile_folders import change_json

from ligertune.errors import UserError
from ligertune.models.adapters.lora import merged_model

SIZES = {"vocab_size": 512, "hidden_size": 32, "num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": 2}
TIED = {**SIZES, "num_hidden_layers": 2, "tie_word_embeddings": True}
BASES = {
    "llama": lambda: tiny_models.config_of("llama", vocab_size=512),
    "llama tied": lambda: tiny_models.config_of("llama_tied", vocab_size=512),
    "gpt2": lambda: transformers.GPT2Config(**TIED),
    "neox": lambda: transformers.GPTNeoXConfig(**TIED, intermediate_size=64),
    "biogpt": lambda: transformers.BioGptConfig(**TIED, intermediate_size=64),
    "falcon": lambda: transformers.FalconConfig(**TIED),
    "mpt": lambda: transformers.MptConfig(vocab_size=512, d_model=32, n_heads=4, n_layers=2, tie_word_embeddings=True),
    "mamba": lambda: transformers.MambaConfig(**TIED, state_size=8),
}
IDS = torch.arange(4, 40)[None]
RESIZED = torch.tensor([[4, 515, 9, 516, 519, 30]])


def load(folder: Path, *, rows: int = 512):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    if rows != 512:
        model.resize_token_embeddings(rows)
    return model.eval()


def logits(model, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def disturb(adapted) -> None:
    """Change the adapter as training does."""
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)


@pytest.fixture
def base(tmp_path, quickstart):
    """Return a function that writes a base model."""

    def write(name: str) -> Path:
        tiny_models.random_model(transformers.AutoModelForCausalLM, BASES[name]()).save_pretrained(tmp_path / "base")
        for file in (quickstart / "stories260K").glob("token*"):
            shutil.copy(file, tmp_path / "base")
        return tmp_path / "base"

    return write


def save_adapter(folder: Path, config: peft.LoraConfig, *, rows: int = 512, **options: object) -> Path:
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(load(folder, rows=rows), config)
        disturb(adapted)
        adapted.save_pretrained(folder.parent / "adapter", **options)
    return folder.parent / "adapter"


def exported(adapter: Path):
    done = run_here("export", adapter, "--out", adapter.parent / "out", cwd=adapter.parent)
    assert done.code == 0, done.err
    model, info = transformers.AutoModelForCausalLM.from_pretrained(adapter.parent / "out", output_loading_info=True)
    assert not any(info.values()), info
    return model


def check_equals_peft(folder: Path, adapter: Path, *, rows: int = 512) -> transformers.PreTrainedModel:
    """Compare the exported model with PeftModel, and return it."""
    ids = IDS if rows == 512 else RESIZED.clamp(max=rows - 1)
    plain = logits(load(folder, rows=rows), ids)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = logits(peft.PeftModel.from_pretrained(load(folder, rows=rows), adapter), ids)
    assert (expected - plain).norm() > 1e-2 * expected.norm()
    merged = exported(adapter)
    found = logits(merged, ids)
    assert found.shape == expected.shape
    assert (found - expected).norm() < 1e-5 * expected.norm()
    return merged


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("gpt2", ["c_attn", "wte"]),
        ("gpt2", ["lm_head"]),
        ("neox", ["query_key_value", "embed_in"]),
        ("neox", ["embed_in", "lm_head"]),
        ("biogpt", ["output_projection"]),
        ("falcon", ["query_key_value", "word_embeddings"]),
        ("mpt", ["Wqkv", "wte"]),
        ("mamba", ["in_proj", "embeddings"]),
        ("llama tied", ["q_proj", "embed_tokens"]),
    ],
)
def test_an_adapter_on_a_tied_weight_changes_only_its_layer(name, targets, base):
    folder = base(name)
    config = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    merged = check_equals_peft(folder, save_adapter(folder, config, save_embedding_layers=False))
    assert not merged.config.tie_word_embeddings


def test_an_adapter_elsewhere_leaves_tied_weights_tied(base):
    folder = base("neox")
    config = peft.LoraConfig(r=4, target_modules=["query_key_value"], trainable_token_indices={"embed_in": [5, 7]})
    assert check_equals_peft(folder, save_adapter(folder, config)).config.tie_word_embeddings


class AlwaysTied(transformers.LlamaForCausalLM):
    def tie_weights(self, *args, **options):
        self.lm_head.weight = self.model.embed_tokens.weight


def test_a_class_that_always_ties_its_weights_is_refused():
    config = tiny_models.config_of("llama_tied")
    adapted = peft.get_peft_model(AlwaysTied(config), peft.LoraConfig(r=4, target_modules=["embed_tokens"]))
    with pytest.raises(UserError, match="AlwaysTied ties them in any case, so it cannot be merged"):
        merged_model(adapted)


@pytest.mark.parametrize("init", ["pissa", "olora", "gaussian", "orthogonal", "mica", "eva", "lora_ga"])
def test_initial_adapters_are_loaded_as_peft_loads_them(init, base):
    folder = base("llama")
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=init, modules_to_save=["lm_head"]
    )
    check_equals_peft(folder, save_adapter(folder, config))


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_initial_adapters_of_transposed_layers_and_scales(init, base):
    folder = base("gpt2")
    config = peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], init_lora_weights=init, use_rslora=True,
                             rank_pattern={"c_fc": 6}, fan_in_fan_out=True)  # fmt: skip
    if init == "olora":  # PEFT's factors of a transposed weight have swapped sizes
        config.target_modules = ["lm_head"]
    check_equals_peft(folder, save_adapter(folder, config, save_embedding_layers=False))


@pytest.mark.parametrize("name, rows, safe", every_pair(["llama", "llama tied", "gpt2"], [520, 500], [True, False]))
def test_an_adapter_with_a_resized_embedding(name, rows, safe, base):
    folder = base(name)
    config = peft.LoraConfig(r=4, target_modules=["c_attn" if name == "gpt2" else "q_proj"], lora_alpha=64)
    adapter = save_adapter(folder, config, rows=rows, save_embedding_layers=True, safe_serialization=safe)
    assert check_equals_peft(folder, adapter, rows=rows).config.vocab_size == rows


@pytest.mark.parametrize("name", ["llama", "llama tied"])
@pytest.mark.parametrize(
    "options", [{"trainable_token_indices": [515, 516]}, {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}],
    ids=["tokens", "adapters on embedding and head"],
)  # fmt: skip
def test_a_resized_embedding_that_peft_saves_by_itself(name, options, base):
    folder = base(name)
    config = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj"], "lora_alpha": 64, **options})
    adapter = save_adapter(folder, config, rows=520)
    check_equals_peft(folder, adapter, rows=520)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_the_export_of_an_unconverted_adapter_is_the_model_that_was_trained(init, base):
    folder = base("llama")
    torch.manual_seed(1)
    adapted = peft.get_peft_model(load(folder), peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=init))
    disturb(adapted)
    adapted.save_pretrained(folder.parent / "adapter")
    expected = logits(adapted)
    assert (logits(exported(folder.parent / "adapter")) - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication copies layers of the base model"),
        ({"init_lora_weights": "pissa_niter_4"}, "is pissa_niter_4, which changes the base by random values"),
        ({"init_lora_weights": "corda"}, "init_lora_weights: corda, which cannot be computed: `eigens`"),
    ],
)
def test_an_adapter_whose_base_is_not_known_is_refused_with_the_reason(changes, says, base):
    adapter = save_adapter(base("llama"), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    change_json(adapter / "adapter_config.json", changes)
    done = run_here("export", adapter, "--out", "out", cwd=adapter.parent)
    assert done.code == 2 and says in " ".join(done.err.split()), done.err
    assert run_here("export", adapter, "--adapter", "--out", "copy", cwd=adapter.parent).code == 0
