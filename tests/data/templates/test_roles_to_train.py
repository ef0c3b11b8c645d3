"""Turns and end tokens that are trained: data.roles_to_train and data.train_on_eos, by the rules of Axolotl.

Axolotl trains the content of each turn of `roles_to_train`, and the end token within three tokens of the content: of
trained turns (turn), of all turns (all), or of the last turn only (last). `axolotl_labels` follows these rules on
tokens, independently of the package.
"""

import json

import numpy as np
import pytest

from ligertune.data.bad_rows import BadRow
from ligertune.data.rows.conversation import Conversation, Message
from ligertune.data.rows.formats import recognise_format
from ligertune.data.rows.sources import Record
from ligertune.data.templates.label_masking import Encoder
from ligertune.data.templates.prompt_templates import ChatTemplate
from ligertune.errors import UserError

MESSAGES = recognise_format("auto", ["messages"], "")
SHOWN = (
    "{% for m in messages %}[{{ m.role }}]\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
TURNS = (
    Message("system", "Add."),
    Message("user", "1 + 1?"),
    Message("assistant", "Two."),
    Message("user", "2 + 2?"),
    Message("assistant", "Four."),
)
END = "</s>"
# (roles, train_on_eos) -> trained texts of TURNS under SHOWN, written by hand from Axolotl's documentation
TRUTH = {
    (("assistant",), "turn"): ["Two.</s>", "Four.</s>"],
    (("assistant",), "last"): ["Two.", "Four.</s>"],
    (("assistant",), "all"): [END, END, "Two.</s>", END, "Four.</s>"],
    (("assistant",), "none"): ["Two.", "Four."],
    (("user",), "turn"): ["1 + 1?</s>", "2 + 2?</s>"],
    (("user",), "last"): ["1 + 1?", "2 + 2?", END],
    (("user",), "all"): [END, "1 + 1?</s>", END, "2 + 2?</s>", END],
    (("user",), "none"): ["1 + 1?", "2 + 2?"],
    (("system", "assistant"), "turn"): ["Add.</s>", "Two.</s>", "Four.</s>"],
    (("user", "assistant"), "last"): ["1 + 1?", "Two.", "2 + 2?", "Four.</s>"],
    (("system", "user", "assistant", "tool"), "turn"): [
        "Add.</s>",
        "1 + 1?</s>",
        "Two.</s>",
        "2 + 2?</s>",
        "Four.</s>",
    ],
}


def template(tokenizer, source=SHOWN, **options) -> ChatTemplate:
    return ChatTemplate(tokenizer, source, "test", None, options.pop("train_on", "assistant"), **options)


def texts(rendered) -> list[str]:
    return [rendered.text[start:end] for start, end in rendered.trained]


@pytest.mark.parametrize(("roles", "eos"), TRUTH)
def test_the_trained_texts_of_each_role_and_end_token(roles, eos, stories):
    rendered = template(stories, roles_to_train=roles, train_on_eos=eos).render(Conversation(TURNS))
    assert texts(rendered) == TRUTH[roles, eos]


def test_a_weight_of_zero_excludes_a_turn_and_all_still_trains_its_end(stories):
    turns = (*TURNS[:4], Message("assistant", "Four.", trained=False))
    for eos, expected in (
        ("turn", ["Two.</s>"]),
        ("last", ["Two.", END]),
        ("all", [END, END, "Two.</s>", END, END]),
        ("none", ["Two."]),
    ):
        assert texts(template(stories, train_on_eos=eos).render(Conversation(turns))) == expected, eos
    last = template(stories, train_on="last", train_on_eos="none").render(Conversation(TURNS))
    assert texts(last) == ["Four."]


def test_generation_blocks_keep_their_text_and_lose_their_end_token(stories):
    marked = SHOWN.replace(
        "{{ m.content }}</s>",
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>{% endgeneration %}{% else %}{{ m.content }}"
        "</s>{% endif %}",
    )
    for eos in ("turn", "last", "all", "none"):
        found = template(stories, marked, train_on_eos=eos).render(Conversation(TURNS))
        assert texts(found) == TRUTH[("assistant",), eos], eos
    both = template(stories, marked, roles_to_train=("user", "assistant")).render(Conversation(TURNS))
    assert texts(both) == ["1 + 1?</s>", "Two.</s>", "2 + 2?</s>", "Four.</s>"]


def test_reasoning_is_masked_and_results_of_tools_can_be_trained(stories):
    turns = (
        Message("user", "q"),
        Message("assistant", "<think>hm</think>wait"),
        Message("tool", "49"),
        Message("assistant", "<think>so</think>49!"),
    )
    options = {"roles_to_train": ("tool", "assistant"), "mask_reasoning": True}
    found = template(stories, train_on_eos="last", **options).render(Conversation(turns))
    assert texts(found) == ["wait", "49", "49!</s>"]


@pytest.mark.parametrize("written", ["m.content ~ m.content", "m.content[:3]", "''"])
def test_a_turn_that_the_template_does_not_write_once_is_counted(written, stories):
    other = SHOWN.replace("{{ m.content }}", f"{{{{ {written} if m.role == 'user' else m.content }}}}")
    turns = Conversation((Message("user", "Add 1."), Message("assistant", "Two.")))
    found = template(stories, other, roles_to_train=("user", "assistant")).render(turns)
    assert texts(found) == ["Two.</s>"] and len(found.unplaced) == 1
    with pytest.raises(BadRow, match="the answer cannot be placed: the template rewrites 'Add 1"):
        template(stories, other, roles_to_train=("user",)).render(turns)


def test_rows_without_a_chat_template_choose_only_their_end_token(stories, prepared):
    eos = stories.eos_token_id
    rows = {
        "alpaca": [{"instruction": "i", "output": "o"}],
        "pairs": [{"prompt": "i:", "completion": "one two"}],
        "text": [{"text": "io"}],
        "own": [{"text": "io</s>"}],
    }
    for name, row in rows.items():
        for choice in ("turn", "last", "all", "none"):
            example = prepared(row, train_on_eos=choice).train[0]
            assert example.input_ids[-1] == eos
            assert (example.labels[-1] == eos) == (choice != "none"), (name, choice)
            assert example.labels[-2] != -100
    for row in (rows["alpaca"], rows["pairs"], rows["text"]):
        with pytest.raises(UserError, match=r"data\.roles_to_train has no effect on rows of format"):
            prepared(row, roles_to_train=["user"])
    with pytest.raises(UserError, match=r"data\.train_on_eos has no effect on rows of format tokenized"):
        prepared([{"input_ids": [5, 6, 2]}], train_on_eos="none")


def test_turns_of_chosen_roles_may_have_a_weight(stories, prepared):
    turns = [{"role": "user", "content": "q", "weight": 1}, {"role": "assistant", "content": "a", "weight": 0}]
    found = prepared([{"messages": turns}], roles_to_train=["human"], prompt_template="chatml").train[0]
    assert stories.decode(found.labels[found.labels != -100]).startswith("q")
    with pytest.raises(UserError, match=r"on a turn by the user: only turns by system and assistant are trained"):
        prepared([{"messages": turns}], roles_to_train=["system", "assistant"], prompt_template="chatml")


def test_without_an_end_token_the_one_of_the_next_role_is_chosen(stories):
    """GLM's way: the token of the next role ends an answer."""
    glm = (
        "{% for m in messages %}{{ '<s>' if m.role == 'user' else '<unk>' }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<unk>{% endif %}"
    )
    turns = Conversation(tuple(turn for turn in TURNS if turn.role != "system"))
    found = {eos: template(stories, glm, train_on_eos=eos).render(turns) for eos in ("turn", "last", "all", "none")}
    assert texts(found["turn"]) == ["Two.<s>", "Four."] and found["turn"].eos == stories.bos_token_id
    assert texts(found["last"]) == ["Two.", "Four."] and found["last"].trains_eos
    assert texts(found["none"]) == ["Two.", "Four."] and found["none"].eos is None
    assert texts(found["all"])[-2:] == ["Two.<s>", "Four."] and found["all"].eos == stories.bos_token_id


# ---- Axolotl's rules on tokens


def axolotl_labels(
    tokenizer, messages: list[dict], roles: tuple[str, ...], eos: str, eot: str
) -> tuple[list[int], list[int]]:
    """Return ids and labels by the documented rules: contents of turns, and EOT and EOS within three tokens."""

    def ids_of(turns: list[dict]) -> list[int]:
        return tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)

    ids = ids_of(messages)
    labels = [-100] * len(ids)
    ends = tokenizer.convert_tokens_to_ids([eot, tokenizer.eos_token])
    last = {}
    for place, turn in enumerate(messages):
        whole = ids_of(messages[: place + 1])
        other = ids_of([*messages[:place], {**turn, "content": "\u2603 other \u2603"}])
        start = next(n for n, (a, b) in enumerate(zip(whole, other, strict=False)) if a != b)
        stop = len(whole) - next(n for n, (a, b) in enumerate(zip(whole[::-1], other[::-1], strict=False)) if a != b)
        trained = turn["role"] in roles
        if trained:
            labels[start:stop] = ids[start:stop]
        for token in ends:
            end = next((n for n in range(stop, min(stop + 4, len(ids))) if ids[n] == token), None)
            if end is not None:
                last[token] = end
                if eos == "all" or (eos == "turn" and trained):
                    labels[end] = ids[end]
    for end in last.values() if eos == "last" else ():
        labels[end] = ids[end]
    return ids, labels


SETTINGS = [
    (roles, eos)
    for roles in (("assistant",), ("user", "assistant"), ("system", "user"))
    for eos in ("turn", "last", "all", "none")
]
ENDS = {"qwen2.5": "<|im_end|>", "mistral-7b-v0.1": "</s>", "phi-3-mini": "<|end|>"}


@pytest.mark.corpus
@pytest.mark.parametrize(("roles", "eos"), SETTINGS)
@pytest.mark.parametrize("name", ENDS)
def test_labels_are_those_of_axolotls_rules_on_recorded_rows(name, roles, eos, tokenizer_named, corpus):
    tokenizer = tokenizer_named(name)
    chosen = template(tokenizer, None, roles_to_train=roles, train_on_eos=eos)
    every = conversations(corpus, with_system=name == "qwen2.5")
    for messages in every:
        rendered = chosen.render(MESSAGES.convert(Record({"messages": messages}, "d:1")))
        (encoded,) = Encoder(tokenizer).encode([rendered])
        ids, labels = axolotl_labels(tokenizer, messages, roles, eos, ENDS[name])
        assert encoded.input_ids.tolist() == ids
        differing = np.flatnonzero(encoded.labels != np.array(labels))
        # a space that is a token: the model has to write it before its answer, so it is trained here
        assert {tokenizer.convert_ids_to_tokens(ids[place]) for place in differing} <= {"\u2581"}
        assert (np.array(labels)[differing] == -100).all()
    assert len(every) >= 8 and sum(len(messages) > 3 for messages in every) >= 3


def conversations(corpus, *, with_system: bool) -> list[list[dict]]:
    """Return recorded conversations of several turns, and short ones with a system turn."""
    rows = [json.loads(line) for line in (corpus / "messages/toy_chat_fine_tuning.jsonl").open(encoding="utf-8")]
    found = [[{"role": turn["role"], "content": turn["content"]} for turn in row["messages"]] for row in rows]
    names = {"human": "user", "gpt": "assistant"}
    lines = (corpus / "sharegpt/sharegpt_gpt4_256.jsonl").read_text(encoding="utf-8").split("\n")[:60]
    found += [
        [{"role": names[turn["from"]], "content": turn["value"]} for turn in json.loads(line)["conversations"]]
        for line in lines
    ]
    if not with_system:
        found = [[turn for turn in one if turn["role"] != "system"] for one in found]
    first = ("system", "user") if with_system else ("user",)
    whole = [one for one in found if one[0]["role"] in first and one[-1]["role"] == "assistant"]
    return [one for one in whole if sum(len(turn["content"]) for turn in one) < 1500]
