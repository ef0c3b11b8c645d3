"""`ligertune generate --draft` on the tiny bundled model, and measurements of a head that has learnt one text."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from support.command_line import run_here
from support.tasks.draft_heads import fitted_head
from transformers import AutoModelForCausalLM, AutoTokenizer

from ligertune.decode.speculative.candidate_tree import CandidateTree, best_paths, chain
from ligertune.decode.speculative.plain_decoding import decode_plainly
from ligertune.features.draft.decode.draft_decoding import TargetModel
from ligertune.features.draft.decode.draft_measure import is_near_tie, measure_draft, rank_shares
from ligertune.features.draft.draft_config import draft_config_of
from ligertune.features.draft.draft_head import DraftHead
from ligertune.features.draft.files.draft_files import DraftTarget, write_draft_head
from ligertune.features.output_head import logit_transform
from ligertune.planning.saved_model import find_saved_model

PROMPT = "Once upon a time"
NEW = 32


@pytest.fixture(scope="module")
def target(quickstart):
    model = AutoModelForCausalLM.from_pretrained(quickstart / "stories260K").eval()
    return TargetModel(model, logit_transform(model))


@pytest.fixture(scope="module")
def prompt(quickstart) -> list[int]:
    return AutoTokenizer.from_pretrained(quickstart / "stories260K")(PROMPT).input_ids


@pytest.fixture(scope="module")
def head(target, prompt) -> DraftHead:
    """A head for half of the vocabulary, and the tokens of the text."""
    text = prompt + decode_plainly(target.model, prompt, NEW)
    size = target.model.config.vocab_size // 2
    rest = [token for token in range(target.model.config.vocab_size) if token not in text]
    ids = sorted([*set(text), *rest][:size])
    config = draft_config_of(target.model.config, draft_vocab_size=size)
    return fitted_head(target.model, config, torch.tensor(ids), text)


@pytest.fixture(scope="module")
def run(head, target, tmp_path_factory, quickstart) -> Path:
    """A folder with draft/eagle3 and draft/speculators, as runs leave them."""
    folder = tmp_path_factory.mktemp("run")
    described = DraftTarget(
        str(quickstart / "stories260K"), target.model.config, target.model.get_input_embeddings().weight
    )
    for layout in ("eagle3", "speculators"):
        write_draft_head(head, folder / "draft" / layout, described, layout=layout, speculative_tokens=3)
    return folder


def generate(quickstart, cwd: Path, *options: object):
    return run_here("generate", quickstart / "stories260K", PROMPT, "--raw", "--max-new-tokens", NEW, *options, cwd=cwd)


@pytest.mark.parametrize("place", [".", "draft", "draft/speculators"])
def test_generate_writes_the_same_text_with_a_draft(place, run, quickstart):
    plain = json.loads(generate(quickstart, run, "--json").out)
    done = generate(quickstart, run, "--draft", run / place, "--draft-tokens", 4, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert (found["text"], found["prompt"], found["new_tokens"]) == (plain["text"], plain["prompt"], NEW)
    assert found["accepted_length"] > 3.0  # the head knows this text
    assert found["tokens_per_second"] == pytest.approx(NEW / found["seconds"])


def test_generate_samples_by_its_seed(run, quickstart):
    options = ("--draft", "draft", "--temperature", 0.8, "--json")
    texts = [json.loads(generate(quickstart, run, *options, "--seed", seed).out)["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_generate_answers_the_prompts_of_a_file_one_after_another(run, quickstart):
    (run / "prompts.txt").write_text(f"{PROMPT}\nLily saw a dog\n")
    many = ("generate", quickstart / "stories260K", "--prompts", "prompts.txt", "--raw", "--max-new-tokens", NEW)
    plain = json.loads(run_here(*many, "--json", cwd=run).out)
    done = run_here(*many, "--draft", "draft", "--json", cwd=run)
    found = json.loads(done.out)
    assert [one["text"] for one in found] == [one["text"] for one in plain]
    assert found[0]["accepted_length"] > found[1]["accepted_length"]  # the head knows the first text
    shown = run_here(*many, "--draft", "draft", cwd=run)
    lines = [line for line in shown.out.splitlines() if line.startswith("---")]
    assert lines == [f"--- 1: {PROMPT} ---", "--- 2: Lily saw a dog ---"]
    assert shown.err.count("tokens per forward pass") == 2


def test_the_smallest_top_p_is_greedy_decoding(run, quickstart):
    greedy = json.loads(generate(quickstart, run, "--json").out)["text"]
    sampled = ("--draft", "draft", "--temperature", 0.8, "--json")
    assert json.loads(generate(quickstart, run, *sampled, "--top-p", 1e-6).out)["text"] == greedy
    assert json.loads(generate(quickstart, run, *sampled).out)["text"] != greedy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--draft", "nowhere"), "nowhere holds no draft head"),
        (("--draft", "draft", "--image", "photo.jpg"), "--image does not work with --draft"),
        (("--draft", "other"), "drafts for a model with vocab_size 256, and this one has 512"),
    ],
)
def test_bad_input_is_one_sentence(options, message, run, quickstart):
    if not (run / "other").exists():
        shutil.copytree(run / "draft" / "eagle3", run / "other")
        config = json.loads((run / "other" / "config.json").read_text())
        (run / "other" / "config.json").write_text(json.dumps({**config, "vocab_size": 256}))
    done = generate(quickstart, run, *options)
    assert done.code == 2
    assert message in " ".join(done.err.split())
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("command", "place"),
    [
        (("generate", PROMPT), "draft/eagle3"),
        (("chat",), "draft/speculators"),
        (("serve", "--port", 0), "draft"),
        (("eval",), "."),
    ],
)
def test_a_draft_head_is_no_model(command, place, run):
    """transformers would load it as a Llama with random weights."""
    done = run_here(command[0], run / place, *command[1:], cwd=run)
    assert done.code == 2
    found = " ".join(done.err.split())
    assert f"{run / place} holds a draft head" in found
    assert f"ligertune generate MODEL --draft {run / place}" in found


def test_a_model_with_a_draft_head_below_it_is_a_model(head, run, quickstart, tmp_path):
    """A draft run may have written into the folder of its model."""
    shutil.copytree(quickstart / "stories260K", tmp_path / "both")
    shutil.copytree(run / "draft", tmp_path / "both" / "draft")
    assert find_saved_model(str(tmp_path / "both"), key="MODEL").name == str(tmp_path / "both")


@pytest.mark.parametrize(("place", "layouts"), [(".", ["eagle3", "speculators"]), ("draft/eagle3", ["eagle3"])])
def test_export_checks_both_layouts(place, layouts, run):
    done = run_here("export", run / place, "--check", "--json", cwd=run)
    assert done.code == 0, done.err
    rows = json.loads(done.out)["check"]
    assert [row["layout"] for row in rows] == layouts
    assert all(row["tokens"] > 10 and row["coverage"] == 0.5 for row in rows)
    prompted = run_here("export", run / place, "--check", "--prompt", "Lily saw a dog.", "--json", cwd=run)
    assert json.loads(prompted.out)["check"][0]["tokens"] < rows[0]["tokens"]


def test_export_refuses_a_layout_that_differs(run, tmp_path):
    folder = tmp_path / "draft"
    shutil.copytree(run / "draft", folder)
    config = folder / "speculators" / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps({**values, "eagle_aux_hidden_state_layer_ids": [2, 3, 4]}))
    done = run_here("export", folder, "--check", cwd=tmp_path)
    assert done.code == 2
    assert "reads the layers [2, 3, 4] of its target, and it was trained on [1, 2, 3]" in " ".join(done.err.split())


def test_measurements_of_a_chain_and_a_tree(target, head, prompt):
    other = [*prompt, 260, 261, 262]
    texts = [tokens + decode_plainly(target.model, tokens, NEW) for tokens in (prompt, other)]
    shares = rank_shares(target, head, texts[:1], depth=3)
    assert all(sum(row[:1]) > 0.8 for row in shares)  # the text that the head has learnt
    assert all(sum(row) <= 1 for row in shares)
    tree = CandidateTree.from_paths(best_paths(rank_shares(target, head, texts, depth=3), 24))
    found = {
        name: measure_draft(target, head, [prompt, other], one, max_new_tokens=NEW)
        for name, one in (("chain", CandidateTree.from_paths(chain(3))), ("tree", tree))
    }
    for one in found.values():
        assert (one.prompts, one.identical, one.near_ties, one.expected) == (2, 2, 0, None)
        assert one.new_tokens == 2 * NEW
        assert one.speed_up == pytest.approx(one.tokens_per_second / one.plain_tokens_per_second)
    assert (found["chain"].tree_nodes, found["chain"].tree_depth) == (4, 3)
    assert found["tree"].tree_nodes == len(tree) > 4
    assert found["tree"].accepted_length > found["chain"].accepted_length > 1.5
    sampled = measure_draft(
        target, head, [prompt], CandidateTree.from_paths(chain(3)), max_new_tokens=NEW, temperature=1.0
    )
    assert (sampled.identical, sampled.near_ties) == (None, None)
    assert len(sampled.expected) == len(sampled.accepted) == 3
    assert json.loads(json.dumps(sampled.as_dict()))["temperature"] == 1.0


def test_a_near_tie_is_told_from_another_difference(prompt, quickstart):
    """The first differing tokens decide: two whose rows in the output head are nearly equal, or any other two."""
    model = AutoModelForCausalLM.from_pretrained(quickstart / "stories260K", tie_word_embeddings=False).eval()
    target = TargetModel(model, logit_transform(model))
    plain = decode_plainly(model, prompt, 8)
    twin = next(token for token in range(300, 512) if token not in plain)
    with torch.no_grad():
        model.lm_head.weight[twin] = 0.99 * model.lm_head.weight[plain[3]]
    assert is_near_tie(target, prompt, [*plain[:3], twin, 5], plain)
    assert not is_near_tie(target, prompt, [*plain[:3], twin - 1, 5], plain)
    assert not is_near_tie(target, prompt, plain[:3], plain)  # it has ended too early


def test_bfloat16_text_is_plain_up_to_near_ties(head, quickstart, prompt):
    model = AutoModelForCausalLM.from_pretrained(quickstart / "stories260K", dtype=torch.bfloat16).eval()
    target = TargetModel(model, logit_transform(model))
    prompts = [prompt, *([*prompt, token] for token in (270, 280, 290))]
    draft = copy.deepcopy(head).to(torch.bfloat16)
    found = measure_draft(target, draft, prompts, CandidateTree.from_paths(chain(3)), max_new_tokens=24)
    assert found.identical + found.near_ties == found.prompts == 4
