"""sample_answers against transformers' generate one prompt at a time, the softmax, and a forward over whole texts."""

import importlib.util
import math
import warnings
from collections import defaultdict
from dataclasses import replace

import peft
import pytest
import torch
from support.models import tiny_models
from support.models.tiny_families import tiny_family
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from ligertune import patch
from ligertune.decode.answers import slot_engine
from ligertune.decode.answers.token_choice import TokenFilters, choose_tokens
from ligertune.decode.batched_answers import AnswerRequest, answer_batches
from ligertune.decode.sampling import Prompt, SamplingNote, SamplingSettings, sample_answers
from ligertune.errors import UserError
from ligertune.patching.lora.fused_lora import fuse_adapters

NEW = 8
GREEDY = SamplingSettings(max_new_tokens=NEW, temperature=0)
DRAWN = SamplingSettings(max_new_tokens=NEW, temperature=1.3, top_k=40, top_p=0.95, min_p=0.01)
LENGTHS = range(1, 51)
NEEDS_BITSANDBYTES = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
SPECIAL = {
    "four bits": pytest.param("four bits", marks=NEEDS_BITSANDBYTES),
    "state in every layer": pytest.param("state in every layer", marks=pytest.mark.slow),
}


@pytest.fixture(scope="module")
def folder(quickstart):
    return quickstart / "stories260K"


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def stories(folder):
    return without_end(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def without_end(model):
    """Return the model in evaluation mode, without a token that ends answers."""
    model.generation_config.eos_token_id = None
    return model.eval()


def with_adapter(model, *, fused: bool):
    """Return the model with a LoRA adapter that changes it."""
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    if fused:
        assert fuse_adapters(adapted)
    return without_end(adapted)


def in_four_bits(folder):
    """Return a random model with weights in NF4, of widths that bitsandbytes takes on a CPU."""
    model = tiny_models.make("llama", hidden_size=128, intermediate_size=128)
    model.save_pretrained(folder)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    return without_end(AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32))


MODELS = {
    "stories": lambda folder, tmp: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
    "adapter": lambda folder, tmp: with_adapter(tiny_models.make("llama"), fused=False),
    "fused adapter": lambda folder, tmp: with_adapter(tiny_models.make("qwen2"), fused=True),
    "sliding window": lambda folder, tmp: tiny_models.make("mistral"),
    "soft caps, alternating windows": lambda folder, tmp: tiny_models.make("gemma2", sliding_window=8),
    "experts": lambda folder, tmp: tiny_models.make("mixtral"),
    "hybrid": lambda folder, tmp: tiny_family("causal", "qwen3_5_text"),
    "state in every layer": lambda folder, tmp: tiny_family("causal", "falcon_h1"),
    "four bits": lambda folder, tmp: in_four_bits(tmp),
}


def prompts_of(lengths, *, seed: int = 0, vocabulary: int = 100) -> list[Prompt]:
    generator = torch.Generator().manual_seed(seed)
    return [Prompt(tuple(torch.randint(3, vocabulary, (n,), generator=generator).tolist()), n) for n in lengths]


@torch.no_grad()
def generated(model, prompt: Prompt, n_new: int = NEW, **others) -> tuple[int, ...]:
    """Return the greedy tokens of transformers' generate."""
    ids = torch.tensor([prompt.ids], device=model.device)
    options = {"max_new_tokens": n_new, "do_sample": False, "pad_token_id": 0, **others}
    made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    return tuple(made[0, ids.shape[1] :].tolist())


def answered(model, tokenizer, prompts, settings, **options) -> dict[tuple[int, int], tuple]:
    """Return {(prompt, number): answer}. The model must be answered slot by slot."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", SamplingNote)
        answers = list(sample_answers(model, tokenizer, prompts, settings, name="tiny", **options))
    found = {(answer.prompt, answer.number): answer for answer in answers}
    assert len(found) == len(answers) == len(prompts) * options.get("answers_each", 1)
    return found


def ids_of(answers) -> dict[tuple[int, int], tuple[int, ...]]:
    return {key: answer.ids for key, answer in answers.items()}


@pytest.mark.parametrize("kind", [SPECIAL.get(kind, kind) for kind in MODELS])
def test_greedy_answers_are_those_of_generate_one_prompt_at_a_time(kind, folder, tokenizer, tmp_path):
    model = without_end(MODELS[kind](folder, tmp_path))
    prompts = prompts_of(LENGTHS if kind == "stories" else (1, 2, 5, 9, 9, 17, 30))
    n_new = 4 if kind == "stories" else NEW  # 50 prompts
    expected = {(place, 0): generated(model, prompt, n_new) for place, prompt in enumerate(prompts)}
    for batch_size in (7, 64) if kind == "stories" else (3,):
        settings = replace(GREEDY, max_new_tokens=n_new)
        assert ids_of(answered(model, tokenizer, prompts, settings, batch_size=batch_size)) == expected


def test_drawn_answers_do_not_depend_on_the_batch_or_on_other_prompts(stories, tokenizer):
    prompts = prompts_of((4, 1, 12, 7, 7, 30, 2))
    whole = answered(stories, tokenizer, prompts, DRAWN, answers_each=3, batch_size=2)
    for batch_size in (1, 5, 64):
        again = answered(stories, tokenizer, prompts, DRAWN, answers_each=3, batch_size=batch_size)
        assert ids_of(again) == ids_of(whole)
    halves = [answered(stories, tokenizer, half, DRAWN, answers_each=3) for half in (prompts[:3], prompts[3:])]
    joined = ids_of(halves[0]) | {(place + 3, number): a.ids for (place, number), a in halves[1].items()}
    assert joined == ids_of(whole)
    assert len(set(ids_of(whole).values())) > 15  # of 21: the answers of a prompt differ


def test_slots_that_memory_limits_have_the_sizes_of_their_prompts(stories, tokenizer, monkeypatch):
    """One long prompt among short ones: three sizes, and the same answers."""
    prompts = prompts_of((4, 100, 12, 7, 30, 2, 90))
    whole = answered(stories, tokenizer, prompts, DRAWN, answers_each=2)
    sizes = []
    groups_of = slot_engine.same_sized_slots

    def record(task, like):
        groups = groups_of(task, like)
        sizes.append([[len(prompts[place].ids) for place in group] for group in groups])
        return groups

    monkeypatch.setattr(slot_engine, "same_sized_slots", record)
    monkeypatch.setattr(slot_engine, "SHARE_OF_FREE", 1e-9)  # room for one slot
    assert ids_of(answered(stories, tokenizer, prompts, DRAWN, answers_each=2)) == ids_of(whole)
    assert ids_of(answered(stories, tokenizer, prompts, DRAWN, answers_each=2, batch_size=5)) == ids_of(whole)
    assert sizes == [[[100, 90], [30, 12], [7, 4, 2]], [[100, 90, 30, 12, 7, 4, 2]]]


def test_another_seed_draws_other_answers(stories, tokenizer):
    (prompt,) = prompts_of((9,))
    first, second = (
        ids_of(answered(stories, tokenizer, [replace(prompt, seed=seed)], DRAWN, answers_each=4)) for seed in (1, 2)
    )
    assert not set(first.values()) & set(second.values())


@pytest.mark.parametrize("kind", ["stories", "adapter", "sliding window", "hybrid"])
def test_log_probabilities_are_those_of_a_forward_over_the_whole_text(kind, folder, tokenizer, tmp_path):
    """They are the model's own: before temperature and filters."""
    model = without_end(MODELS[kind](folder, tmp_path))
    prompts = prompts_of((1, 6, 20))
    for (place, _), answer in answered(model, tokenizer, prompts, DRAWN, answers_each=2, batch_size=4).items():
        text = torch.tensor([prompts[place].ids + answer.ids])
        with torch.no_grad():
            expected = model(input_ids=text, use_cache=False).logits[0, -NEW - 1 : -1].log_softmax(-1)
        expected = expected.gather(1, torch.tensor(answer.ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer.log_probs), expected, rtol=0, atol=1e-4)


FILTERS = [
    TokenFilters(1.0, 0, 1.0, 0.0),
    TokenFilters(0.7, 0, 1.0, 0.0),
    TokenFilters(1.0, 5, 1.0, 0.0),
    TokenFilters(1.5, 0, 0.8, 0.0),
    TokenFilters(1.0, 0, 1.0, 0.1),
    TokenFilters(2.0, 12, 0.9, 0.05),
]


def allowed_probabilities(logits: torch.Tensor, filters: TokenFilters) -> torch.Tensor:
    """Return the distribution (V,) of transformers' warpers."""
    from transformers.generation import logits_process as warpers

    chain = [warpers.TemperatureLogitsWarper(filters.temperature)]
    chain += [warpers.TopKLogitsWarper(filters.top_k)] if filters.top_k else []
    chain += [warpers.TopPLogitsWarper(filters.top_p)] if filters.top_p < 1 else []
    chain += [warpers.MinPLogitsWarper(filters.min_p)] if filters.min_p else []
    scores = logits[None]
    for warper in chain:
        scores = warper(torch.zeros(1, 1, dtype=torch.long), scores)
    return scores[0].softmax(0)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_counts_of_20000_draws_follow_transformers_distribution(filters):
    """Chi-square over tokens with at least 10 expected draws, at five deviations; no draw outside of the support."""
    n_draws, n_tokens = 20_000, 64
    logits = 2 * torch.randn(n_tokens, generator=torch.Generator().manual_seed(3))
    expected = allowed_probabilities(logits, filters)
    places = torch.arange(n_draws // 2, dtype=torch.int32).repeat(2)  # places of two answers
    keys = torch.tensor([[12345, -678], [2**31 - 1, 7]], dtype=torch.int32).repeat_interleave(n_draws // 2, 0)
    drawn, log_probs = choose_tokens(logits.expand(n_draws, -1), keys, places, filters)
    counts = torch.bincount(drawn, minlength=n_tokens)
    assert not counts[expected == 0].any()
    frequent = expected * n_draws >= 10
    degrees = int(frequent.sum()) - 1
    squares = ((counts - expected * n_draws) ** 2 / (expected * n_draws))[frequent].sum()
    assert squares < degrees + 5 * math.sqrt(2 * degrees)
    torch.testing.assert_close(log_probs, logits.log_softmax(0)[drawn])  # whatever the filters


def test_neighbouring_places_and_answers_draw_independently():
    """Pairs of draws of equal distributions fall on the diagonal as often as independent ones: five deviations."""
    n = 20_000
    logits = torch.zeros(16)
    plain = TokenFilters(1.0, 0, 1.0, 0.0)
    places = torch.arange(n, dtype=torch.int32)
    first, second = (
        choose_tokens(logits.expand(n, -1), torch.tensor([key], dtype=torch.int32).expand(n, 2), places, plain)[0]
        for key in ([1, 2], [1, 3])
    )
    for other, one in ((second, first), (first[1:], first[:-1])):
        same = int((other == one).sum())
        assert abs(same - n / 16) < 5 * math.sqrt(n / 16)


def test_a_stop_text_ends_an_answer_even_across_tokens(stories, tokenizer):
    prompts = [Prompt(tuple(tokenizer.encode("Once upon a time")), 0), Prompt(tuple(tokenizer.encode("One day")), 0)]
    settings = replace(GREEDY, max_new_tokens=40)
    free = answered(stories, tokenizer, prompts, settings)
    texts = {key: answer.text for key, answer in free.items()}
    stop = texts[0, 0][20:27]
    pieces = [tokenizer.decode([token]) for token in free[0, 0].ids]
    assert not any(stop in piece for piece in pieces)
    for batch_size in (1, 2):
        found = answered(stories, tokenizer, prompts, replace(settings, stop=(stop,)), batch_size=batch_size)
        assert found[0, 0].text == texts[0, 0].partition(stop)[0]
        assert found[0, 0].finish == "stop" and len(found[0, 0].ids) == len(found[0, 0].log_probs) < 40
        assert found[0, 0].ids == free[0, 0].ids[: len(found[0, 0].ids)]
        assert stop in tokenizer.decode(found[0, 0].ids) and stop not in tokenizer.decode(found[0, 0].ids[:-1])
        unstopped = stop not in texts[1, 0]
        assert not unstopped or (found[1, 0].ids == free[1, 0].ids and found[1, 0].finish == "length")


def test_end_tokens_of_the_caller_and_of_the_generation_settings_end_answers(folder, tokenizer):
    model = without_end(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    prompts = prompts_of((5, 9, 14))
    free = ids_of(answered(model, tokenizer, prompts, GREEDY))
    end = free[1, 0][3]
    expected = {key: ids[: ids.index(end) + 1] if end in ids else ids for key, ids in free.items()}
    asked = answered(model, tokenizer, prompts, replace(GREEDY, end_tokens=(end,)))
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, end]
    for found in (asked, answered(model, tokenizer, prompts, GREEDY)):
        assert ids_of(found) == expected
        assert all(a.finish == ("stop" if end in a.ids else "length") for a in found.values())
    assert asked[1, 0].text == tokenizer.decode(expected[1, 0], skip_special_tokens=True)


def test_a_patched_model_in_training_keeps_its_mode_and_its_attention(folder, tokenizer, stories):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="per_document")
    patch(model)
    model.generation_config.eos_token_id = None
    model.train()
    prompts = prompts_of((3, 8, 21))
    assert ids_of(answered(model, tokenizer, prompts, DRAWN, answers_each=2)) == ids_of(
        answered(stories, tokenizer, prompts, DRAWN, answers_each=2)
    )
    assert model.training and model.config._attn_implementation == "per_document"
    iterator = sample_answers(model, tokenizer, prompts, DRAWN, name="tiny")
    next(iterator)
    iterator.close()  # a caller that wants no more
    assert model.training and model.config._attn_implementation == "per_document"


@pytest.mark.parametrize(
    "family", ["bloom", pytest.param("deepseek_v32", marks=pytest.mark.slow)]
)  # positions by masks; a cache of another kind
def test_models_without_slots_are_answered_by_generate_with_a_note(family, tokenizer):
    model = without_end(tiny_family("causal", family))
    prompts = prompts_of((3, 7, 7, 12))
    expected = {place: generated(model, prompt) for place, prompt in enumerate(prompts)}
    model.generation_config.no_repeat_ngram_size = 1  # settings of a model do not count
    with pytest.warns(SamplingNote, match="answers are made by transformers' generate, in batches of prompts"):
        found = sample_answers(model, tokenizer, prompts, GREEDY, name="tiny", batch_size=2)
        assert {answer.prompt: answer.ids for answer in found} == expected
    alone, together = (
        {
            (a.prompt, a.number): (a.ids, len(a.log_probs))
            for a in sample_answers(
                model, tokenizer, prompts, replace(DRAWN, end_tokens=(5,)), answers_each=2, name="tiny", batch_size=size
            )
        }
        for size in (1, 3)
    )
    assert alone == together and all(len(ids) == n for ids, n in alone.values())


@pytest.mark.parametrize("family", ["stories", "bloom"])
def test_tokens_of_growing_answers_are_passed_on(family, stories, tokenizer):
    """Slots and `generate` pass on each token once, and none after the end of an answer."""
    model = stories if family == "stories" else without_end(tiny_family("causal", family))
    prompts = prompts_of((3, 7, 7, 12))
    shown = defaultdict(list)
    settings = replace(DRAWN, max_new_tokens=12, end_tokens=tuple(range(5, 512, 3)))  # most answers end early
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingNote)
        options = {"name": "tiny", "batch_size": 2}
        found = sample_answers(
            model, tokenizer, prompts, settings, on_tokens=lambda place, ids: shown[place].extend(ids), **options
        )
        expected = {answer.prompt: list(answer.ids) for answer in found}
    assert shown == expected and len({len(ids) for ids in expected.values()}) > 1


def test_without_room_for_a_slot_transformers_answers(stories, tokenizer, monkeypatch):
    prompts = prompts_of((3, 7, 12))
    monkeypatch.setattr(slot_engine, "_free_bytes", lambda device: 1000)
    with pytest.warns(SamplingNote, match="memory has no room for the longest prompt with max_new_tokens"):
        found = list(sample_answers(stories, tokenizer, prompts, GREEDY, name="tiny"))
    assert {answer.prompt: answer.ids for answer in found} == {n: generated(stories, p) for n, p in enumerate(prompts)}


def test_bfloat16_answers_differ_only_where_the_two_best_logits_are_within_rounding(folder, tokenizer):
    model = without_end(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    prompts = prompts_of(range(2, 42, 2))
    found = ids_of(answered(model, tokenizer, prompts, GREEDY, batch_size=7))
    n_different = 0
    for place, prompt in enumerate(prompts):
        expected = generated(model, prompt)
        ours = found[place, 0]
        if ours != expected:
            n_different += 1
            at = next(n for n in range(NEW) if ours[n] != expected[n])
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([prompt.ids + ours[:at]]), use_cache=False).logits[0, -1].float()
            gap = logits[expected[at]] - logits[ours[at]]
            assert gap.abs() <= 2**-7 * 4 * logits.abs().max()
    assert n_different <= len(prompts) // 4


def test_prompts_and_answers_without_tokens_are_refused(stories, tokenizer):
    prompts = [*prompts_of((3,)), Prompt((), 0)]
    with pytest.raises(UserError, match=r"Prompt 2 has no tokens"):
        list(sample_answers(stories, tokenizer, prompts, GREEDY, name="tiny"))
    with pytest.raises(UserError, match=r"max_new_tokens is 0: expected at least 1"):
        list(sample_answers(stories, tokenizer, prompts[:1], replace(GREEDY, max_new_tokens=0), name="tiny"))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["stories", "sliding window", "hybrid"])
def test_answers_on_a_gpu_are_recorded_and_those_of_generate(kind, folder, tokenizer, tmp_path):
    """Steps are recorded after 16 tokens; a note would be an error."""
    model = without_end(MODELS[kind](folder, tmp_path)).cuda()
    prompts = prompts_of((1, 5, 9, 9, 17, 30))
    expected = {(place, 0): generated(model, prompt, 40) for place, prompt in enumerate(prompts)}
    settings = replace(GREEDY, max_new_tokens=40)
    assert ids_of(answered(model, tokenizer, prompts, settings, batch_size=4)) == expected
    drawn = replace(DRAWN, max_new_tokens=40)
    alone, together = (answered(model, tokenizer, prompts, drawn, answers_each=3, batch_size=n) for n in (1, 8))
    assert ids_of(alone) == ids_of(together)
    expected = {(place, 0): generated(model, one, 40, repetition_penalty=1.5) for place, one in enumerate(prompts)}
    shown = defaultdict(list)
    options = {"batch_size": 4, "on_tokens": lambda place, ids: shown[place].extend(ids)}
    assert ids_of(answered(model, tokenizer, prompts, replace(settings, repetition_penalty=1.5), **options)) == expected
    assert {(place, 0): tuple(ids) for place, ids in shown.items()} == expected


def test_nan_is_one_sentence(folder, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.model.norm.weight.data[3] = math.nan
    for settings in (GREEDY, DRAWN):
        with pytest.raises(UserError, match="The model tiny computes NaN"):
            list(sample_answers(model, tokenizer, prompts_of((3, 4)), settings, name="tiny"))


def test_a_repetition_penalty_is_that_of_generate(stories, tokenizer):
    prompts = prompts_of((1, 3, 12, 7, 30))
    n_new = 24
    expected = {(place, 0): generated(stories, one, n_new, repetition_penalty=1.5) for place, one in enumerate(prompts)}
    assert expected != {(place, 0): generated(stories, one, n_new) for place, one in enumerate(prompts)}
    settings = replace(GREEDY, max_new_tokens=n_new, repetition_penalty=1.5)
    for batch_size in (2, 8):
        assert ids_of(answered(stories, tokenizer, prompts, settings, batch_size=batch_size)) == expected


def test_settings_of_requests_and_models_are_those_of_generate(stories, tokenizer, monkeypatch):
    """The settings of a model count for evaluation, as in `lm_eval`, unless the request has its own."""
    prompts = prompts_of((3, 7, 12))
    n_new = 24

    def texts(**changes):
        answers = [generated(stories, prompt, n_new, **changes) for prompt in prompts]
        return [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]

    def answers(*sampling):
        requests = [AnswerRequest(prompt.ids, (), n_new, sampling) for prompt in prompts]
        return answer_batches(stories, tokenizer, requests, name="tiny", batch_size=2)

    plain = texts()
    asked = {"suppress_tokens": [generated(stories, prompts[0], 1)[0]], "repetition_penalty": 1.5}
    changed = texts(**asked)
    others = [texts(**{name: value}) for name, value in asked.items()]
    assert len({tuple(found) for found in (plain, changed, *others)}) == 4
    without_slots = pytest.warns(SamplingNote, match="slots have no suppress_tokens")
    with without_slots:
        assert answers(*asked.items()) == changed
    for name, value in asked.items():
        monkeypatch.setattr(stories.generation_config, name, value)
    with without_slots:
        assert answers() == changed
    with warnings.catch_warnings():
        warnings.simplefilter("error", SamplingNote)
        neutral = {"suppress_tokens": None, "repetition_penalty": 1.0, "num_beams": 1}
        assert answers(*neutral.items()) == plain


@pytest.mark.parametrize("option", [("num_beams", 4), ("typical_p", 0.9)])
def test_beams_and_other_filters_are_refused(option, stories, tokenizer):
    requests = [AnswerRequest((5, 6), (), NEW, (option,))]
    with pytest.warns(SamplingNote), pytest.raises(UserError, match=f"{option[0]}: answers are made without it"):
        answer_batches(stories, tokenizer, requests, name="tiny")


def test_drawn_answers_of_requests_follow_torchs_seed(stories, tokenizer):
    sampling = (("do_sample", True), ("temperature", 1.5))
    requests = [AnswerRequest(prompt.ids, (), NEW, sampling) for prompt in prompts_of((3, 7, 7))]
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(answer_batches(stories, tokenizer, requests, name="tiny"))
    assert found[0] == found[1] != found[2]
    before = torch.get_rng_state()  # greedy answers, of which a run makes some while it trains, draw nothing
    answer_batches(stories, tokenizer, [replace(request, sampling=()) for request in requests], name="tiny")
    assert torch.equal(before, torch.get_rng_state())


def test_requests_of_several_settings_report_their_progress(stories, tokenizer):
    shares = []
    requests = [AnswerRequest(prompt.ids, (), 1 + prompt.seed % 2) for prompt in prompts_of((3, 4, 5, 6))]
    answers = answer_batches(stories, tokenizer, requests, name="tiny", progress=shares.append)
    assert answers == [tokenizer.decode(generated(stories, Prompt(one.ids, 0), one.max_new_tokens)) for one in requests]
    assert shares == [0.25, 0.5, 0.75, 1.0]
