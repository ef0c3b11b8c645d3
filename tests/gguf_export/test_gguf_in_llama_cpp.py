"""GGUF files in llama.cpp (package xllamacpp, on the CPU): its tokens and probabilities are ours."""

import json
import unicodedata

import pytest
import torch
from support.command_line import run_here
from support.llama_cpp import LlamaCpp
from support.models.gguf_models import CASES, make_case, save
from support.models.tiny_models import make
from support.quickstart_runs import SHORT, saves, train
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from ligertune.decode.generate import Decoding, encode_prompt, format_prompt, generate_answer, load_model
from ligertune.gguf_export.export_gguf import write_gguf
from ligertune.gguf_export.gguf_families import FAMILIES
from ligertune.gguf_export.gguf_vocabulary import SPLITTERS

pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")
pytestmark = pytest.mark.slow

TEXT = (
    "Once upon a time there was a little girl named Lily. She loved to play outside in the park with her dog. "
    "One day they found a big red ball."
)
# Largest difference of a log-probability. llama.cpp looks GELU up in a table of float16.
CLOSE = {"gemma": 3e-3, "gemma2": 3e-3, "gemma3": 3e-3}


@torch.no_grad()
def log_probabilities(model, ids):
    return model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("name", CASES)
def test_a_family_has_the_probabilities_of_transformers(name, tmp_path):
    model = make_case(name)
    model.set_attn_implementation("eager")  # torch's own has no soft cap in transformers 5.17
    folder = save(model, tmp_path)
    write_gguf(folder, folder / "x.gguf", "f32")
    server = LlamaCpp(folder / "x.gguf", context=256)
    # 60 tokens: past the windows of Gemma, and as far as rotary scaling shows
    ids = torch.randint(3, 256, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = log_probabilities(model, ids)
    for length in (3, 20, 60):
        found = torch.from_numpy(server.log_probabilities(ids[:length], 512))
        assert float((found - expected[length - 1]).abs().max()) < CLOSE.get(name, 1e-4)


@pytest.fixture(scope="module")
def trained(quickstart):
    folder = quickstart / "stories260K"
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_64_greedy_tokens_are_those_of_transformers(kind, trained, quickstart, tmp_path):
    model, tokenizer = trained
    write_gguf(quickstart / "stories260K", tmp_path / "x.gguf", kind)
    server = LlamaCpp(tmp_path / "x.gguf")
    for prompt in ("Once upon a time", "The dog", "Lily and Tom", " \nTwo  spaces"):
        ids = tokenizer(prompt)["input_ids"]
        ours = model.generate(torch.tensor([ids]), max_new_tokens=64, do_sample=False)[0, len(ids) :].tolist()
        assert server.greedy(prompt, 64) == ours and len(ours) == 64


# llama.cpp also rounds activations: f16 to 11 bits, 5e-4 of logits of about 5; bf16 and q8_0 to 8 bits.
LOSSES = [("f16", 2.5e-3, 1e-4), ("bf16", 1e-2, 1e-3), ("q8_0", 1e-2, 1e-2)]


@pytest.mark.parametrize(("kind", "loss", "divergence"), LOSSES)
def test_rounding_costs_little(kind, loss, divergence, trained, quickstart, tmp_path):
    """Mean loss and largest divergence from float32, in nats."""
    model, tokenizer = trained
    write_gguf(quickstart / "stories260K", tmp_path / "x.gguf", kind)
    server = LlamaCpp(tmp_path / "x.gguf")
    ids = tokenizer(TEXT)["input_ids"]
    expected = log_probabilities(model, ids)
    lost = []
    for length in range(8, len(ids), 5):
        truth = expected[length - 1]
        found = torch.from_numpy(server.log_probabilities(ids[:length], 512))
        lost.append(float(truth[ids[length]] - found[ids[length]]))
        assert float((truth.exp() * (truth - found)).sum()) < divergence
    assert abs(sum(lost) / len(lost)) < loss


ODD = [
    *("x" + " " * count + "y" for count in range(34)),
    *(" " * count for count in range(1, 34)),
    *("\t\t\tx\n\n\n  y", " leading", "trailing ", "\x00\x01", "\r\n\r\n", "1234567 3.14", "don't DON'T I'LL we'Ve"),
    # a family of emoji, a ligature, wide digits; a byte order mark, a space without width
    *("\U0001f469\u200d\U0001f467 \ufb01 \u00bd \uff11\uff12", "\ufeffbom", "a\u200bb", "na\u00efve caf\u00e9"),
    # capitals and marks of other scripts inside of words, a title-case letter
    *(
        "\u041c\u043e\u0441\u043a\u0432\u0430\u0413\u043e\u0440\u043e\u0434",
        "\u00c9COLE \u00e9cole\u00c9cole",
        "\u0391\u03bb\u03c6\u03b1\u0392\u03b7\u03c4\u03b1 \u01c5x",
    ),
    *("e\u0301a\u0301 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35", "camelCaseWords HTTPServer it'S /usr//bin/\n"),
    *("\u4e2d\u6587 and English", "\u0928\u092e\u0938\u094d\u0924\u0947", "if (x==1){\n    return y;\n}\n"),
]


def odd_texts(corpus):
    vectors = (corpus / "tokenizers" / "reference_vectors" / "qwen2.inp").read_text(encoding="utf-8")
    return [*ODD, *filter(None, vectors.split("\n__ggml_vocab_test__\n"))]


@pytest.mark.parametrize("name", ["stories260K", "gpt2", "qwen2.5", "mistral-7b-v0.1", "phi-3-mini"])
def test_llama_cpp_finds_the_tokens_of_the_tokenizer(name, corpus, quickstart, tmp_path):
    source = quickstart / name if name == "stories260K" else corpus / "tokenizers" / name
    tokenizer = AutoTokenizer.from_pretrained(source)
    rows = len(tokenizer) + 7
    folder = save(make("llama", vocab_size=rows, hidden_size=32, num_hidden_layers=1), tmp_path, source)
    write_gguf(folder, folder / "x.gguf", "f16")
    server = LlamaCpp(folder / "x.gguf", context=64)
    # Qwen's composes characters, and llama.cpp does not
    texts = [text for text in odd_texts(corpus) if name != "qwen2.5" or unicodedata.is_normalized("NFC", text)]
    plain = {text: tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts}
    assert {text: server.tokens(text) for text in texts} == plain
    special = [f"{tokenizer.eos_token}\n{text}{tokenizer.eos_token}" for text in ("Hi", "  there ")]
    special = [text for text in special if name != "phi-3-mini"]  # it drops spaces after special tokens
    assert [server.tokens(text, special=True) for text in special] == [tokenizer(text)["input_ids"] for text in special]


@pytest.mark.parametrize("splitter", SPLITTERS.items(), ids=SPLITTERS.values())
def test_each_named_splitter_splits_as_the_expression_does(splitter, corpus, quickstart, tmp_path):
    """A tokenizer that is trained with the expression, on texts of several scripts."""
    (steps, ignore_merges), name = splitter
    texts = odd_texts(corpus)
    pieces = {
        "digits": pre_tokenizers.Digits(individual_digits=True),
        "ByteLevel": pre_tokenizers.ByteLevel(add_prefix_space=False),
    }
    parts = [pieces.get(step) or pre_tokenizers.Split(Regex(step), "isolated") for step in steps]
    if "ByteLevel" not in steps:
        parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        [*texts * 3, (quickstart / "dolly_short.jsonl").read_text(encoding="utf-8")[:50_000]], trainer
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    folder = save(make("llama", vocab_size=len(wrapped), hidden_size=32, num_hidden_layers=1), tmp_path)
    wrapped.save_pretrained(folder)
    write_gguf(folder, folder / "x.gguf", "f16")
    server = LlamaCpp(folder / "x.gguf", context=64)
    assert {text: server.tokens(text) for text in texts} == {text: wrapped(text)["input_ids"] for text in texts}, name


@pytest.mark.parametrize("template", ["chat", "alpaca"])
def test_a_space_at_the_start_only_is_that_of_the_prompt_of_training(template, trained, tmp_path):
    """Llama's class in transformers puts a space before the first text only, and llama.cpp everywhere or nowhere."""
    folder = save(trained[0], tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.normalizer = None
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.save_pretrained(folder)
    prompt = {"prompt_template": template, "system_prompt": None}
    (folder / "ligertune.json").write_text(json.dumps(prompt))
    write_gguf(folder, folder / "x.gguf", "f16")
    text, ids = encode_prompt(tokenizer, "Say hi.", prompt)
    server = LlamaCpp(folder / "x.gguf")
    assert server.chat_prompt([{"role": "user", "content": "Say hi."}]) == text.removeprefix("<s>")
    assert server.tokens(text.removeprefix("<s>"), special=True) == ids


def test_the_chat_template_makes_the_prompt_of_training(quickstart, tmp_path, trained):
    write_gguf(quickstart / "stories260K", tmp_path / "x.gguf", "f16")
    server = LlamaCpp(tmp_path / "x.gguf")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hi."}]
    text, _ = format_prompt(trained[1], "Say hi.", {"prompt_template": "chat", "system_prompt": "Be brief."})
    assert server.chat_prompt(messages) == text.removeprefix("<s>")  # llama.cpp adds BOS with the tokens


def test_the_prompt_of_alpaca_is_the_chat_template_of_a_run_that_was_trained_on_it(quickstart, tmp_path, trained):
    folder = save(trained[0], tmp_path)
    (folder / "ligertune.json").write_text(json.dumps({"prompt_template": "alpaca", "system_prompt": None}))
    write_gguf(folder, folder / "x.gguf", "f16")
    prompt = LlamaCpp(folder / "x.gguf").chat_prompt([{"role": "user", "content": "Say hi."}])
    assert prompt == format_prompt(trained[1], "Say hi.", {"prompt_template": "alpaca", "system_prompt": None})[0]


def test_a_lora_run_and_its_checkpoint_say_in_llama_cpp_what_generate_says(tmp_path, monkeypatch):
    changes = {**SHORT, **saves(1), "method.type": "lora", "train.max_steps": 3, "train.learning_rate": 0.05}
    train(tmp_path, **changes)
    run = tmp_path / "run"
    merged = run_here("export", run, "--gguf", "f32", "--json", cwd=tmp_path)
    step = run_here("export", run, "--checkpoint", "step-1", "--out", "one", "--gguf", "f32", "--json", cwd=tmp_path)
    assert (merged.code, step.code) == (0, 0), merged.err + step.err
    texts = []
    for done, model in ((merged, run), (step, tmp_path / "one")):
        loaded = load_model(str(model if model != run else run / "model"), raw=False)
        ids = encode_prompt(loaded.tokenizer, "Say hi.", loaded.template)[1]
        expected = generate_answer(loaded, "Say hi.", Decoding(64), seed=0).text
        found = LlamaCpp(tmp_path / json.loads(done.out)["file"]).greedy(ids, 64)
        assert loaded.tokenizer.decode(found, skip_special_tokens=True) == expected
        texts.append(expected)
    assert texts[0] != texts[1]
    monkeypatch.delitem(FAMILIES, "LlamaForCausalLM")  # another family is refused before anything is merged
    refused = run_here("export", run, "--checkpoint", "step-1", "--out", "two", "--gguf", "f32", cwd=tmp_path)
    assert refused.code == 2 and "LlamaForCausalLM is not written as GGUF" in refused.err
    assert not (tmp_path / "two").exists()
