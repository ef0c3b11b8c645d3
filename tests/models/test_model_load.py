"""Loading of configuration, tokenizer and weights from the recipe's model section, and its error messages."""

import contextlib
import json
import shutil

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from support.models import tiny_models
from support.models.tiny_families import tiny_family

from ligertune.data.modalities.image.families import family_of
from ligertune.errors import UserError
from ligertune.files.model_files import RECIPE_MODEL, check_sizes
from ligertune.models.load import build_model
from ligertune.models.load_tokenizer import check_vocabulary, load_tokenizer
from ligertune.models.read_config import read_config
from ligertune.planning.options import ModelOptions, TokenizerOptions

TEXT = [
    "Llama-2-7b", "Llama-3.1-8B", "Llama-3.2-1B", "Llama-3.2-3B", "Meta-Llama-3-8B", "Mistral-7B-v0.1",
    "Mixtral-8x7B-v0.1", "Phi-3-mini-4k-instruct", "Qwen2-7B", "Qwen2.5-0.5B", "Qwen2.5-7B", "Qwen3-0.6B", "Qwen3-8B",
    "SmolLM2-135M", "TinyLlama-1.1B", "gemma-2-2b", "gemma-2-9b", "gemma-7b",
]  # fmt: skip
VISION = ["Llama-3.2-11B-Vision", "Qwen2-VL-2B-Instruct", "llava-1.5-7b-hf"]


def spec(path, **values) -> ModelOptions:
    return ModelOptions(model_name_or_path=str(path), **values)


def build(path, *, seed=0, dtype=torch.float32, device="cpu", **values):
    wanted = spec(path, **values)
    return build_model(wanted, read_config(wanted), dtype=dtype, device=device, seed=seed)


@pytest.fixture
def folder(tmp_path):
    """A tiny Llama written by save_pretrained, without a tokenizer."""
    tiny_models.make("llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def rewrite(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# ---- configuration


@pytest.mark.corpus
@pytest.mark.parametrize("name", TEXT)
def test_published_configurations_are_read_and_built(corpus, name):
    config = read_config(spec(corpus / "model_configs" / name))
    model = build_model(spec("x", init="random"), config, dtype=torch.bfloat16, device="meta", seed=0)
    published = json.loads((corpus / "model_configs" / "parameter_counts.json").read_text())
    assert model.num_parameters() == next(row["parameters"] for row in published if row["name"] == name)


@pytest.mark.corpus
@pytest.mark.parametrize("name", VISION)
def test_vision_models_are_recognised_and_their_language_model_is_truncated(corpus, name):
    model = build(corpus / "model_configs" / name, init="random", num_hidden_layers=2, device="meta")
    assert type(model).__name__.endswith("ForConditionalGeneration") and family_of(model.config) is not None
    assert len(model.model.language_model.layers) == 2


def test_a_vision_model_of_another_family_is_refused(tmp_path):
    transformers.Idefics3Config().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="kind idefics3 cannot be trained here"):
        read_config(spec(tmp_path))


def test_num_hidden_layers_truncates_lists_with_one_entry_per_layer(folder):
    layers = {"num_hidden_layers": 6, "layer_types": ["full_attention"] * 6}
    rewrite(folder, **layers, model_type="qwen2", use_sliding_window=False)
    model = build(folder, init="random", num_hidden_layers=2)
    assert (model.config.num_hidden_layers, len(model.config.layer_types), len(model.model.layers)) == (2, 2, 2)
    with pytest.raises(UserError, match="num_hidden_layers: 7, but the model has 6"):
        read_config(spec(folder, init="random", num_hidden_layers=7))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "not a valid JSON file"),
        ("{}", "model_type"),
        ('{"model_type": "wobble"}', "wobble"),
        ('{"model_type": "llama", "hidden_size": "many"}', "hidden_size"),
        ('{"model_type": "llama", "hidden_size": 100, "num_attention_heads": 7}', "multiple of the number of"),
        ('{"model_type": "clip_text_model"}', "no causal language model"),
    ],
)
def test_unusable_configurations(tmp_path, content, complaint):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=complaint) as raised:
        read_config(spec(tmp_path))
    assert str(raised.value).startswith("model.model_name_or_path: ")


@pytest.mark.slow
def test_the_sizes_of_every_family_are_accepted():
    checked = 0
    families = [*transformers.MODEL_FOR_CAUSAL_LM_MAPPING, *transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING]
    for family in families:
        with contextlib.suppress(ValueError, StrictDataclassError):  # some have no defaults
            values = json.loads(family().to_json_string(use_diff=False))
            check_sizes(values, family.__name__, RECIPE_MODEL)
            checked += 1
    assert checked > 0.9 * len(families)


def test_missing_folders(tmp_path):
    for name in (tmp_path / "absent", "./absent", "~/absent/model", "a/b/c"):
        with pytest.raises(UserError, match="does not exist"):
            read_config(spec(name))
    with pytest.raises(UserError, match="holds no config"):
        read_config(spec(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file, not a folder"):
        read_config(spec(tmp_path / "file"))


def test_a_hub_id_without_a_hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # no retries
    with pytest.raises(UserError, match="is not a folder here, and the hub could not be reached"):
        read_config(spec("absent/no-such-model-here"))


# ---- tokenizer


@pytest.mark.corpus
@pytest.mark.parametrize(
    ("name", "pad", "noted"),
    [
        ("qwen2.5", "<|endoftext|>", False),  # its own
        ("mistral-7b-v0.1", "<unk>", True),  # has none
        ("phi-3-mini", "<unk>", True),  # has EOS
        ("gpt2", None, True),  # EOS is its only special token
    ],
)
def test_padding_never_hides_eos(corpus, name, pad, noted):
    loaded = load_tokenizer(spec(corpus / "tokenizers" / name))
    assert loaded.tokenizer.pad_token == pad
    assert loaded.pad_token_id != loaded.tokenizer.eos_token_id
    assert 0 <= loaded.pad_token_id < len(loaded.tokenizer)
    assert bool(loaded.notes) is noted
    if pad is not None:
        assert loaded.tokenizer.convert_ids_to_tokens(loaded.pad_token_id) == pad
    else:  # an ordinary token, which is still decoded
        assert loaded.tokenizer.decode([loaded.pad_token_id], skip_special_tokens=True) != ""


def test_tokens_and_template_of_the_recipe_are_used(quickstart, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0]['content'] }}", encoding="utf-8")
    wanted = {"pad_token": "<unk>", "eos_token": "<s>", "chat_template": str(template)}
    loaded = load_tokenizer(spec(quickstart / "stories260K", tokenizer=TokenizerOptions(**wanted)))
    assert (loaded.tokenizer.pad_token, loaded.tokenizer.eos_token, loaded.notes) == ("<unk>", "<s>", ())
    assert loaded.pad_token_id == loaded.tokenizer.convert_tokens_to_ids("<unk>")
    assert loaded.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


@pytest.mark.parametrize(
    ("wanted", "complaint"),
    [
        ({"eos_token": "<|wobble|>"}, r"model\.tokenizer\.eos_token: the tokenizer has no token '<\|wobble\|>'"),
        ({"pad_token": "<|wobble|>"}, r"model\.tokenizer\.pad_token: the tokenizer has no token"),
        ({"chat_template": "chatml.jinja"}, r"model\.tokenizer\.chat_template: there is no file chatml\.jinja"),
        ({"path": "/absent/tokenizer"}, r"model\.tokenizer\.path: no tokenizer could be loaded from /absent"),
    ],
)
def test_unusable_tokenizer_settings(quickstart, wanted, complaint):
    with pytest.raises(UserError, match=complaint):
        load_tokenizer(spec(quickstart / "stories260K", tokenizer=TokenizerOptions(**wanted)))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, r"Set model\.tokenizer\.path"),
        ("{", "Expecting property name"),
        ("{}", r"tokenizer\.json is not a tokenizer"),
    ],
)
def test_a_missing_or_broken_tokenizer(quickstart, folder, content, complaint):
    if content is not None:
        shutil.copytree(quickstart / "stories260K", folder, dirs_exist_ok=True)
        (folder / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=complaint):
        load_tokenizer(spec(folder))


def test_a_model_of_a_class_with_a_tokenizer_but_without_its_files(tmp_path):
    tiny_family("causal", "qwen3_5_text").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"the tokenizer of .* is empty"):
        load_tokenizer(spec(tmp_path))


def test_a_tokenizer_with_more_ids_than_the_model(quickstart, folder):
    loaded = load_tokenizer(spec(folder, tokenizer=TokenizerOptions(path=str(quickstart / "stories260K"))))
    assert len(loaded.tokenizer) == 512
    with pytest.raises(UserError, match="highest token id is 511, but the model's vocabulary has 128"):
        check_vocabulary(loaded.tokenizer, read_config(spec(folder)))
    check_vocabulary(loaded.tokenizer, read_config(spec(quickstart / "stories260K")))


# ---- model


def test_pretrained_weights_are_loaded_in_the_given_dtype(folder):
    truth = tiny_models.make("llama").state_dict()
    for dtype in (torch.float32, torch.bfloat16):
        state = build(folder, dtype=dtype).state_dict()
        assert all(torch.equal(state[name], truth[name].to(dtype)) for name in truth)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_random_weights_depend_on_the_seed_only(device, folder):
    """They are made on their device."""
    random_state = torch.get_rng_state if device == "cpu" else torch.cuda.get_rng_state
    before = random_state()
    states = [build(folder, init="random", seed=seed, device=device).state_dict() for seed in (1, 1, 2)]
    assert torch.equal(random_state(), before)
    assert {value.device.type for value in states[0].values()} == {device}
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["lm_head.weight"], states[2]["lm_head.weight"])


def test_attn_implementation_of_the_recipe_is_used(folder):
    assert build(folder).config._attn_implementation == "sdpa"
    assert build(folder, attn_implementation="eager").config._attn_implementation == "eager"


@pytest.mark.skipif(torch.cuda.is_available(), reason="flash attention may be installed there")
@pytest.mark.parametrize("init", ["random", "pretrained"])
def test_attention_that_is_not_installed_is_refused(folder, init):
    with pytest.raises(UserError, match=r"flash_attention_2 cannot be used.*or auto"):
        build(folder, init=init, attn_implementation="flash_attention_2")


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), r"weights of .* could not be loaded.*init: random"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), r"safetensors is not a complete"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"hello"), r"safetensors is not a complete"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"{" * 100), r"safetensors is not a complete"),
        (
            lambda folder: rewrite(folder, vocab_size=200),
            r"the shape \[200, 64\], and its weight files hold \[128, 64\]",
        ),
    ],
    ids=["missing", "empty", "short", "not safetensors", "another shape"],
)
def test_unusable_weights_are_refused(folder, damage, complaint):
    damage(folder)
    with pytest.raises(UserError, match=complaint):
        build(folder)


def test_missing_weights_are_refused(folder, tmp_path):
    headless = tmp_path / "headless"
    tiny_models.make("llama").model.save_pretrained(headless)
    shutil.copy(folder / "config.json", headless)
    with pytest.raises(UserError, match=r"lacks 1 of the model's weights \(lm_head\.weight\)"):
        build(headless)
