"""Log-likelihoods and answers in batches against plain transformers, one text at a time."""

from pathlib import Path

import peft
import pytest
import torch
from ligertune_kernels import LinearLora
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from ligertune import patch
from ligertune.decode.batched_answers import AnswerRequest, answer_batches
from ligertune.decode.log_probs import CHUNK_ROWS, LogitForm, by_kernel, by_torch, prepare_to_score
from ligertune.decode.text_scorer import TextBatching, TextScorer, rolling_windows
from ligertune.errors import UserError
from ligertune.patching.packing_checks import prepare_masks

CONTEXT = "Once upon a time there was a"
PAIRS = [
    (CONTEXT, " little girl"),
    (CONTEXT, " dog who liked to run"),
    ("The bird said ", "hello."),  # the space moves to the continuation
    ("", "One day"),
    *((f"{CONTEXT} boy named", f" {letter}") for letter in "ABT"),  # one input row for the three
]
TEXTS = ["Tim went to the park. He saw a big ball.", "One day, Lily found a stone. " * 12]


@pytest.fixture(scope="module")
def folder(quickstart) -> Path:
    return quickstart / "stories260K"


@pytest.fixture(scope="module")
def plain(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def patched(folder):
    """A model with our kernels, which attends within packed documents."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="per_document")
    patch(model)
    prepare_masks(model)
    return model.eval()


def plain_likelihood(model, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    ids = torch.tensor([[*context, *continuation]])
    with torch.no_grad():
        log_probs = model(input_ids=ids).logits[0, len(context) - 1 : -1].log_softmax(-1)
    targets = torch.tensor(continuation)
    total = log_probs.gather(1, targets[:, None]).double().sum()
    return float(total), bool((log_probs.argmax(1) == targets).all())


@pytest.mark.parametrize("packed", [True, False])
def test_log_likelihoods_are_those_of_one_text_at_a_time(packed, patched, plain, tokenizer):
    scorer = TextScorer(patched, tokenizer, TextBatching(packed, 8 if packed else 1, 0, tokens_per_pass=64))
    pairs = [scorer.encode_pair(*pair) for pair in PAIRS]
    assert [tokenizer.decode(one) for one in pairs[2]] == ["<s> The bird said", "hello."]
    assert pairs[3][0] == [tokenizer.bos_token_id]
    greedy = plain.generate(torch.tensor([pairs[0][0]]), do_sample=False, max_new_tokens=6)
    pairs.append((pairs[0][0], greedy[0, len(pairs[0][0]) :].tolist()))
    shares = []
    found = scorer.score(pairs, shares.append)
    for (context, continuation), (total, is_greedy) in zip(pairs, found, strict=True):
        expected, best = plain_likelihood(plain, context, continuation)
        assert total == pytest.approx(expected, rel=5e-7)
        assert is_greedy == best
    assert [is_greedy for _, is_greedy in found][-1]
    assert shares[-1] == 1.0 and len(shares) > 1


@pytest.mark.parametrize(("scale", "softcap", "adapted"), [(1.0, None, False), (0.5, 3.0, True)])
def test_chunks_of_logits_have_the_numbers_of_the_kernel(scale, softcap, adapted):
    torch.manual_seed(0)
    hidden = torch.randn(CHUNK_ROWS + 5, 16, dtype=torch.float64)
    weight, bias = torch.randn(40, 16, dtype=torch.float64), torch.randn(40, dtype=torch.float64)
    lora = LinearLora(torch.randn(2, 16).double(), torch.randn(40, 2).double(), 0.7) if adapted else None
    targets = torch.randint(0, 40, (len(hidden),))
    logits = hidden @ weight.T + bias
    logits = (logits if lora is None else logits + 0.7 * hidden @ lora.a.T @ lora.b.T) * scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected = -torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    for compute in (by_kernel, by_torch):
        log_probs, is_best = compute(hidden, weight, bias, targets, LogitForm(scale, softcap, lora))
        torch.testing.assert_close(log_probs.double(), expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(is_best, logits.argmax(1) == targets)


def test_an_adapter_on_the_output_head_is_part_of_the_log_likelihoods(tokenizer):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2)  # fmt: skip
    model = LlamaForCausalLM(config).double()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["lm_head", "q_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter.data, std=0.3)
    adapted.eval()
    pairs = [TextScorer(adapted, tokenizer, TextBatching(False, 1, 0)).encode_pair(*pair) for pair in PAIRS]
    expected = [plain_likelihood(adapted, *pair)[0] for pair in pairs]
    patch(adapted)
    found = TextScorer(adapted, tokenizer, TextBatching(False, 1, 0)).score(pairs)
    assert [one[0] for one in found] == pytest.approx(expected, rel=1e-6)


def test_a_model_without_our_loss_gives_the_same_log_likelihoods(folder, plain, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    prepare_to_score(model, "sft")
    scorer = TextScorer(model, tokenizer, TextBatching(False, 1, 0))
    pairs = [scorer.encode_pair(*pair) for pair in PAIRS]
    expected = [plain_likelihood(plain, *pair) for pair in pairs]
    assert [one[0] for one in scorer.score(pairs)] == pytest.approx([one[0] for one in expected], rel=5e-7)


def test_texts_are_scored_in_windows_that_predict_each_token_once(patched, plain, tokenizer):
    scorer = TextScorer(patched, tokenizer, TextBatching(True, 8, 0))
    scorer.max_length = 40
    expected = []
    for text in TEXTS:
        ids = tokenizer.encode(text)
        windows = list(rolling_windows(ids, tokenizer.bos_token_id, 40))
        assert [token for _, continuation in windows for token in continuation] == ids
        assert all(len(context) + len(continuation) <= 41 for context, continuation in windows)
        expected.append(sum(plain_likelihood(plain, *window)[0] for window in windows))
    assert len(windows) > 2
    assert len(windows[-1][0]) > 1  # the last one has the full context
    assert scorer.score_texts(TEXTS) == pytest.approx(expected, rel=5e-7)


def test_a_long_context_loses_its_first_tokens_and_a_long_continuation_is_refused(patched, plain, tokenizer):
    scorer = TextScorer(patched, tokenizer, TextBatching(True, 1, 0))
    scorer.max_length = 16
    context = tokenizer.encode(TEXTS[1])[:60]
    continuation = tokenizer.encode(" a stone", add_special_tokens=False)
    kept = context[-(17 - len(continuation)) :]
    assert scorer.score([(context, continuation)])[0][0] == pytest.approx(
        plain_likelihood(plain, kept, continuation)[0], rel=5e-7
    )
    with pytest.raises(UserError, match="continuation has 60 tokens"):
        scorer.score([([1], context)])


def test_answers_in_batches_are_those_of_one_prompt_at_a_time(patched, plain, tokenizer):
    prompts = [CONTEXT, "One day", "Tim and his mom went to the park. They"]
    stops = ((".", "\n\n"), ())
    requests = [
        AnswerRequest(tuple(tokenizer.encode(prompt)), stop, 12) for stop in stops for prompt in prompts
    ]  # fmt: skip
    answers = answer_batches(patched, tokenizer, requests, name="stories260K", batch_size=2)
    assert patched.config._attn_implementation == "per_document"
    for request, answer in zip(requests, answers, strict=True):
        ids = torch.tensor([request.ids])
        with torch.no_grad():
            made = plain.generate(ids, do_sample=False, max_new_tokens=12, pad_token_id=0)
        text = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
        for stop in request.stop:
            text = text.split(stop)[0]
        assert answer == text
