"""A GGUF file, read back: tensors, hyperparameters, tokenizer; and what is refused."""

import json
import math
import os
import re
import resource
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.command_line import run_here
from support.models.gguf_models import QWEN, SENTENCEPIECE, byte_level, make_case, save
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from ligertune.errors import UserError
from ligertune.gguf_export.export_gguf import write_gguf
from ligertune.gguf_export.gguf_vocabulary import SPLITTERS, vocabulary

gguf = pytest.importorskip("gguf")


# as published in tokenizer.json
LLAMA_3 = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read(file):
    """Return ({key: value}, {name: (type, values float32)}) of a file."""
    reader = gguf.GGUFReader(file)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {
        one.name: (one.tensor_type.name, gguf.quants.dequantize(one.data, one.tensor_type).astype(np.float32))
        for one in reader.tensors
    }
    return keys, tensors


def written(folder, kind="f32", name="x.gguf"):
    write_gguf(folder, folder / name, kind)
    return read(folder / name)


# ---- tensors


def test_the_quickstarts_model_read_back(tmp_path, quickstart):
    model = quickstart / "stories260K"
    done = run_here("export", model, "--out", tmp_path / "out", "--gguf", "f32", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    report = json.loads(done.out)
    keys, tensors = read(report["file"])
    assert os.path.basename(report["file"]) == "stories260K-f32.gguf" and not report["notes"]
    expected = {
        "general.architecture": "llama", "general.name": "stories260K-f32", "general.file_type": 0,
        "llama.block_count": 5, "llama.context_length": 512, "llama.embedding_length": 64, "llama.vocab_size": 512,
        "llama.feed_forward_length": 172, "llama.attention.head_count": 8, "llama.attention.head_count_kv": 4,
        "llama.attention.key_length": 8, "llama.rope.dimension_count": 8, "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False, "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.chat_template": (model / "chat_template.jinja").read_text(encoding="utf-8"),
    }  # fmt: skip
    assert {name: keys[name] for name in expected} == expected
    assert keys["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    stored = load_file(model / "model.safetensors")
    names = {"output_norm": "norm", "token_embd": "embed_tokens", "blk.3.ffn_down": "layers.3.mlp.down_proj",
             "blk.4.attn_v": "layers.4.self_attn.v_proj"}  # fmt: skip
    for ours, name in names.items():
        assert (tensors[f"{ours}.weight"][1] == stored[f"model.{name}.weight"].numpy()).all()
    assert "output.weight" not in tensors and len(tensors) == 2 + 5 * 9  # the output is tied to the embedding
    text = (tmp_path / "out" / "Modelfile").read_text(encoding="utf-8")
    assert "FROM ./stories260K-f32.gguf\n" in text and 'PARAMETER stop "</s>"' in text and "### assistant:" in text
    assert sorted(os.listdir(tmp_path / "out")) == ["Modelfile", "README.md", "stories260K-f32.gguf"]


def test_rotary_pairs_of_llama_become_neighbours(tmp_path):
    model = make_case("llama with biases")
    tensors = written(save(model, tmp_path))[1]
    for ours, heads in (("q", 4), ("k", 2)):  # 16 wide
        order = [head * 16 + half * 8 + pair for head in range(heads) for pair in range(8) for half in range(2)]
        layer = getattr(model.model.layers[1].self_attn, f"{ours}_proj")
        assert (tensors[f"blk.1.attn_{ours}.weight"][1] == layer.weight.detach().numpy()[order]).all()
        assert (tensors[f"blk.1.attn_{ours}.bias"][1] == layer.bias.detach().numpy()[order]).all()
    other = make_case("qwen3")
    found = written(save(other, tmp_path / "other"))[1]
    assert (found["blk.0.attn_q.weight"][1] == other.model.layers[0].self_attn.q_proj.weight.detach().numpy()).all()
    assert (found["output.weight"][1] == other.lm_head.weight.detach().numpy()).all()


def test_norms_of_gemma_hold_one_plus_the_weight(tmp_path):
    model = make_case("gemma3")
    keys, tensors = written(save(model, tmp_path))
    norm = model.model.layers[5].self_attn.q_norm.weight.detach().numpy()
    assert (tensors["blk.5.attn_q_norm.weight"][1] == norm + 1.0).all()
    assert keys["gemma3.rope.freq_base_swa"] == 500.0 and keys["gemma3.rope.scaling.factor"] == 4.0
    assert keys["gemma3.attention.sliding_window"] == 8


def test_experts_of_a_layer_are_one_tensor_in_their_order(tmp_path):
    folder = save(make_case("mixtral"), tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_local_experts": 11}))  # 10 comes after 9
    experts = {f"model.layers.{layer}.block_sparse_moe.experts.{number}.{name}.weight": torch.full(shape, float(number))
               for layer in range(2) for number in range(11)
               for name, shape in (("w1", (96, 64)), ("w2", (64, 96)), ("w3", (96, 64)))}  # fmt: skip
    change_weights(folder, experts)
    keys, tensors = written(folder, "f16")
    assert (keys["llama.expert_count"], keys["llama.expert_used_count"]) == (11, 2)
    for name, shape in (("gate", (11, 96, 64)), ("up", (11, 96, 64)), ("down", (11, 64, 96))):
        kind, values = tensors[f"blk.1.ffn_{name}_exps.weight"]
        assert kind == "F16" and values.shape == shape and (values[:, 0, 0] == np.arange(11)).all()
    assert tensors["blk.0.ffn_gate_inp.weight"][0] == "F32"
    change_weights(folder, {"model.layers.1.block_sparse_moe.experts.10.w2.weight": None})
    with pytest.raises(UserError, match="the layer does not have 11 experts of one size"):
        written(folder, name="other.gguf")


def test_factors_of_llama3_divide_long_wavelengths(tmp_path):
    factors = written(save(make_case("llama, rope llama3"), tmp_path))[1]["rope_freqs.weight"][1]
    expected = []
    for pair in range(8):
        wavelength = 2 * math.pi * 10000.0 ** (2 * pair / 16)
        smooth = (64 / wavelength - 1.0) / (4.0 - 1.0)
        between = 1 / ((1 - smooth) / 8.0 + smooth)
        expected.append(1.0 if wavelength < 64 / 4.0 else 8.0 if wavelength > 64 / 1.0 else between)
    assert factors == pytest.approx(expected, rel=1e-5) and len({round(one, 3) for one in expected}) > 2


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory):
    """A Llama in bfloat16 whose MLP is 80 wide, which blocks of 32 do not divide: its folder and its weights."""
    folder = tmp_path_factory.mktemp("bfloat16")
    save(make_case("llama").to(torch.bfloat16), folder)
    return folder, {name: tensor.float().numpy() for name, tensor in load_file(folder / "model.safetensors").items()}


@pytest.mark.parametrize(("kind", "file_type"), [("f16", 1), ("bf16", 32), ("q8_0", 7)])
def test_matrices_have_the_type_that_was_asked_for_and_vectors_float32(kind, file_type, bfloat16):
    folder, weights = bfloat16
    keys, tensors = written(folder, kind, f"{kind}.gguf")
    assert keys["general.file_type"] == file_type
    assert {name: found for name, (found, _) in tensors.items() if name.endswith("norm.weight")} == {
        name: "F32" for name in tensors if name.endswith("norm.weight")
    }
    found, values = tensors["blk.1.ffn_up.weight"]
    truth = weights["model.layers.1.mlp.up_proj.weight"]
    assert found == kind.upper()
    if kind == "q8_0":
        blocks = np.abs(truth.reshape(-1, 32)).max(1, keepdims=True)
        # half a step of the block's scale, which is rounded to float16 itself
        assert (
            np.abs((values - truth).reshape(-1, 32)) <= blocks / 127 * 0.5 * 1.01 + 127 * blocks / 127 * 2**-11
        ).all()
    else:
        assert values == pytest.approx(truth, rel=2**-11 if kind == "f16" else 0, abs=1e-7 if kind == "f16" else 0)


def test_rows_that_blocks_do_not_divide_are_float16_with_a_note(tmp_path, quickstart):
    done = write_gguf(quickstart / "stories260K", tmp_path / "x.gguf", "q8_0")
    assert done.notes == ("5 matrices with rows of no multiple of 32 are stored as float16.",)
    tensors = read(tmp_path / "x.gguf")[1]
    assert {name for name, (kind, _) in tensors.items() if kind == "F16"} == {
        f"blk.{n}.ffn_down.weight" for n in range(5)
    }


# ---- tokenizer


def test_pieces_of_sentencepiece_have_scores_and_types(tmp_path):
    keys = written(save(make_case("llama", rows=520), tmp_path))[0]
    tokens, scores, types = (keys[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    content = json.loads((SENTENCEPIECE / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    assert all(tokens[number] == piece for piece, number in vocab.items())
    merges = [one if isinstance(one, str) else " ".join(one) for one in content["model"]["merges"]]
    first, last = (merges[place].replace(" ", "") for place in (0, -1))
    assert scores[vocab[first]] == 0 and scores[vocab[last]] == -merges.index(merges[-1])
    assert types[:3] == [2, 3, 3] and types[3] == 6 and types[vocab[first]] == 1  # unknown, control, byte, normal
    assert tokens[512:] == [f"[PAD{number}]" for number in range(512, 520)] and types[512:] == [5] * 8


def test_byte_level_merges_and_the_name_of_the_splitter(tmp_path):
    folder = save(make_case("qwen3"), tmp_path)
    byte_level(added=("<|im_end|>", "<tool>")).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [259, 7]}))
    keys = written(folder)[0]
    expected = {"model": "gpt2", "pre": "qwen2", "merges": ["h e", "he l", "\u0120 h"], "eos_token_id": 259,
                "eot_token_id": 7, "add_bos_token": False, "add_eos_token": False}  # fmt: skip
    assert {name: keys[f"tokenizer.ggml.{name}"] for name in expected} == expected
    assert keys["tokenizer.ggml.tokens"][256:261] == ["he", "hel", "\u0120h", "<|im_end|>", "<tool>"]
    assert keys["tokenizer.ggml.token_type"][258:262] == [1, 3, 3, 5]


def metaspace(scheme):
    """Return the quickstart's tokenizer with Metaspace, as transformers' class of Llama makes it."""
    tokenizer = AutoTokenizer.from_pretrained(SENTENCEPIECE)
    tokenizer.backend_tokenizer.normalizer = None
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    return tokenizer


@pytest.mark.parametrize(
    ("scheme", "chat", "raw"), [("always", True, True), ("first", False, True), ("never", False, False)]
)
def test_a_space_is_put_before_texts_as_in_training(scheme, chat, raw):
    tokenizer = metaspace(scheme)
    for after_special, adds in ((True, chat), (False, raw)):
        found = vocabulary(tokenizer, 512, [], after_special=after_special)
        assert found.metadata["tokenizer.ggml.add_space_prefix"] == adds
        assert bool(found.notes) == (scheme != "never")


def test_chat_prompts_begin_with_bos_and_those_of_alpaca_do_not(tmp_path):
    folder = save(make_case("llama"), tmp_path)
    metaspace("first").save_pretrained(folder)
    for template, adds in (("chat", False), ("alpaca", True), ("raw", True)):
        (folder / "ligertune.json").write_text(json.dumps({"prompt_template": template, "system_prompt": None}))
        assert written(folder, name=f"{template}.gguf")[0]["tokenizer.ggml.add_space_prefix"] == adds


def test_tokenizers_that_llama_cpp_does_not_have_are_refused():
    assert SPLITTERS[(QWEN,), False] == "qwen2"
    assert SPLITTERS[(LLAMA_3,), True] == "llama-bpe" and SPLITTERS[(TEKKEN,), True] == "tekken"
    with pytest.raises(UserError, match=r"splits texts by an expression .*convert_hf_to_gguf.py"):
        vocabulary(byte_level(QWEN.replace("{L}+", "{L}")), 300, [])
    with pytest.raises(UserError, match=r"has 260 tokens, and the model's embedding 259 rows"):
        vocabulary(byte_level(), 259, [])
    unigram = Tokenizer(models.Unigram([("a", 0.0)], 0))
    with pytest.raises(UserError, match="of type Unigram"):
        vocabulary(PreTrainedTokenizerFast(tokenizer_object=unigram), 300, [])
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(UserError, match=r"in a way that is not known here \(ByteLevel\)"):
        vocabulary(tokenizer, 300, [])


def test_a_piece_without_its_merge_is_refused(tmp_path):
    content = json.loads((SENTENCEPIECE / "tokenizer.json").read_text(encoding="utf-8"))
    del content["model"]["merges"][40]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="pieces without their merges"):
        vocabulary(PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json")), 512, [])


# ---- what is refused, and what stays


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
ONE_WINDOW = {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}
DIFFERENT = [
    ("llama", {"architectures": ["PhiForCausalLM"]}, r"PhiForCausalLM is not written as GGUF.*convert_hf_to_gguf.py"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "is not written as GGUF"),
    ("llama", {"quantization_config": {"quant_method": "fp8"}}, "the weights of this model are quantised"),
    ("llama", {"hidden_act": "gelu"}, "the activation gelu, and llama.cpp computes silu"),
    ("llama", {"rope_parameters": {**YARN, "beta_fast": 9.0}}, "yarn with beta_fast 9.0"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "of type dynamic"),
    ("qwen3", {"rope_parameters": LLAMA3}, "llama3 scaling"),
    ("qwen3", ONE_WINDOW, "layers with sliding windows"),
    ("qwen3 moe", {"norm_topk_prob": False}, "weights of experts whose sum is not 1"),
    ("qwen3 moe", {"mlp_only_layers": [0]}, "layers without experts"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "a part of",
    ),
    ("gemma2", {"query_pre_attn_scalar": 99}, "query_pre_attn_scalar 99, and llama.cpp computes 16"),
    ("gemma3", {"final_logit_softcapping": 9.0}, "a soft cap of logits"),
    ("gemma3", {"layer_types": ["full_attention"] * 6}, "an own order of sliding windows"),
]


@pytest.mark.parametrize(("case", "changes", "message"), DIFFERENT)
def test_what_llama_cpp_computes_differently_is_refused(case, changes, message, tmp_path):
    folder = save(make_case(case), tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(UserError, match=message):
        written(folder)
    assert not list(folder.glob("*.gguf")) + list(folder.glob(".*.partial"))


def test_the_context_of_mistral_is_its_window(tmp_path):
    folder = save(make_case("mistral"), tmp_path)
    done = write_gguf(folder, folder / "x.gguf", "f32")
    assert read(done.file)[0]["llama.context_length"] == 64
    assert "the context is 64 tokens, the sliding window" in done.notes[0]


BAD = {
    "missing": ({"model.layers.1.mlp.up_proj.weight": None}, "lack 1 tensor, such as blk.1.ffn_up"),
    "unknown": ({"model.layers.0.extra.weight": torch.ones(2)}, "model.layers.0.extra.weight has no place"),
    "rows of q": (
        {"model.layers.0.self_attn.q_proj.weight": torch.ones(60, 64)},
        "has 60 rows, and config.json says 64",
    ),
    "rows of the embedding": (
        {"model.embed_tokens.weight": torch.ones(500, 64)},
        "has 500 rows, and config.json says 512",
    ),
    "NaN": ({"model.norm.weight": torch.full((64,), math.nan)}, "model.norm.weight holds NaN"),
    "too large": ({"lm_head.weight": torch.full((512, 64), 1e5)}, "lm_head.weight has numbers above 65,504"),
    "float8": ({"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}, "stored as F8_E4M3"),
}


def change_weights(folder, changes):
    """Replace tensors of a saved model; None removes one."""
    found = {**load_file(folder / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in found.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_bad_weights_are_refused_and_leave_no_file(changes, message, tmp_path):
    folder = save(make_case("llama"), tmp_path)
    change_weights(folder, changes)
    with pytest.raises(UserError, match=message):
        written(folder, "f16")
    assert not list(folder.glob("*.gguf")) + list(folder.glob(".*.partial"))


def test_a_bias_that_llama_cpp_does_not_read_is_refused(tmp_path):
    folder = save(make_case("qwen3"), tmp_path)
    change_weights(folder, {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)})
    with pytest.raises(UserError, match=r"model\.layers\.0\.self_attn\.q_proj\.bias has no place"):
        written(folder)


def test_tensors_behind_the_model_are_left_out_with_a_note(tmp_path):
    folder = save(make_case("llama"), tmp_path)
    more = {"mtp.fc.weight": torch.ones(4, 4), "model.layers.2.self_attn.q_proj.weight": torch.ones(64, 64)}
    change_weights(folder, more)
    done = write_gguf(folder, folder / "x.gguf", "f32")
    assert done.notes[0].startswith("2 tensors that GGUF has no place for are left out: model.layers.2.self_attn")
    assert len(read(done.file)[1]) == 3 + 2 * 9


# ---- the command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gguf", "q4_k_m"), "no Python package writes q4_k_m. Write --gguf bf16, then run llama.cpp's own: llama-q"),
        (("--gguf", "f8"), "--gguf: f8 is not one of f32, f16, bf16, q8_0."),
        (("--gguf", "f16", "--push", "me/it"), "--gguf cannot be combined with"),
    ],
)  # fmt: skip
def test_refusals_of_the_command(arguments, message, quickstart, tmp_path):
    done = run_here("export", quickstart / "stories260K", "--out", tmp_path / "out", *arguments, cwd=tmp_path)
    assert done.code == 2 and message in " ".join(done.err.split()), done.err
    assert not (tmp_path / "out").exists()


def test_without_the_package_one_sentence_says_what_to_install(quickstart, tmp_path, monkeypatch):
    monkeypatch.setattr("ligertune.gguf_export.export_gguf.find_spec", lambda name: None)
    done = run_here("export", quickstart / "stories260K", "--gguf", "f16", cwd=tmp_path)
    assert done.code == 2 and "pip install 'gguf>=0.19'" in done.err


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, quickstart):
    """An adapter of PEFT on the quickstart's model that changes its logits."""
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("adapted") / "adapter"
    base = AutoModelForCausalLM.from_pretrained(quickstart / "stories260K")
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    model.peft_config["default"].base_model_name_or_path = str(quickstart / "stories260K")
    model.save_pretrained(folder)
    return folder, model.merge_and_unload().state_dict()


def test_an_adapter_is_merged_and_its_folder_can_be_converted_again(adapter, tmp_path):
    folder, merged = adapter
    first = run_here("export", folder, "--out", "out", "--gguf", "f32", cwd=tmp_path)
    assert first.code == 0, first.err
    down = read(tmp_path / "out" / "adapter-f32.gguf")[1]["blk.2.ffn_down.weight"][1]
    assert down == pytest.approx(merged["model.layers.2.mlp.down_proj.weight"].numpy(), abs=1e-6)
    # a model in the folder may be that of another checkpoint, so that it is converted by its own name only
    again = run_here("export", folder, "--out", "out", "--gguf", "bf16", cwd=tmp_path)
    words = " ".join(again.err.split())
    assert again.code == 2 and "out holds a model already" in words
    command = re.search(r"`ligertune (.+?)`", words)[1]
    other = run_here(*command.split(), cwd=tmp_path)
    assert other.code == 0, other.err
    assert {"out-bf16.gguf", "adapter-f32.gguf", "Modelfile", "Modelfile-out-bf16"} <= set(os.listdir(tmp_path / "out"))


def test_a_full_disk_leaves_no_file(quickstart, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))  # bytes of a file; Python ignores the signal
    try:
        with pytest.raises(UserError, match=r"x\.gguf could not be written.*Make room"):
            write_gguf(quickstart / "stories260K", tmp_path / "x.gguf", "f32")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1000))
        with pytest.raises(UserError, match=r"x\.gguf needs 1\.0 MiB, and 1\.0 KiB are free"):
            write_gguf(quickstart / "stories260K", tmp_path / "x.gguf", "f32")
