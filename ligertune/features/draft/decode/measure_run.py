"""`ligertune draft RECIPE --measure`: decode held-out prompts with the head in output_dir, as a chain and as a tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ligertune.data.examples import Examples
from ligertune.data.prepare import prepare
from ligertune.decode.speculative.candidate_tree import CandidateTree, best_paths, chain
from ligertune.decode.speculative.plain_decoding import prompt_token_ids
from ligertune.errors import UserError, format_rate
from ligertune.features.draft.decode.draft_decoding import TargetModel
from ligertune.features.draft.decode.draft_generate import NEEDS_PLAIN_HEAD
from ligertune.features.draft.decode.draft_measure import measure_draft, rank_shares
from ligertune.features.draft.files.draft_files import head_folder, read_draft_head
from ligertune.features.draft.recipe import DraftSpec
from ligertune.features.draft.training.draft_target import frozen_as, with_adapter
from ligertune.features.output_head import logit_transform
from ligertune.hardware import this_machine
from ligertune.models.compile import run_eagerly
from ligertune.models.load import build_model, hide_loading_bars
from ligertune.models.load_tokenizer import load_tokenizer
from ligertune.models.read_config import read_config
from ligertune.planning.feature_spec import ResultTable
from ligertune.planning.options import RunOptions
from ligertune.planning.precision import choose_precision

PROMPTS = 8  # held-out prompts that are decoded
NEW_TOKENS = 128  # of each, at most
TREE_NODES = 32  # of the measured tree, with the root
TEXTS = 32  # held-out texts that the tree is chosen by
TEXT_TOKENS = 512  # of each, at most: scores of all pairs of a text's tokens are stored


def measure_run(options: RunOptions) -> dict[str, Any]:
    """Return a measurement of a greedy chain, a greedy tree and a sampled chain, by name. Raises UserError."""
    hide_loading_bars()
    build = options.build
    spec = build.section(DraftSpec)
    machine = this_machine()
    config = read_config(build.model)
    head = read_draft_head(head_folder(options.checkpoint.output_dir), config)
    dtype = getattr(torch, choose_precision(build.model.dtype, machine).weights)
    model = build_model(
        build.model, config, dtype=dtype, device=machine.device, seed=build.seed, stored_as=frozen_as(build)
    )
    model = with_adapter(build, model)
    head = head.to(model.device, dtype).eval()
    target = TargetModel(model, logit_transform(model, hint=NEEDS_PLAIN_HEAD))
    examples = _held_out(options)
    prompts = [prompt_token_ids(one.input_ids, one.labels) for one in examples.select(range(_few(examples, PROMPTS)))]
    texts = [one.input_ids[:TEXT_TOKENS].tolist() for one in examples.select(range(_few(examples, TEXTS)))]
    depth = spec.num_speculative_tokens
    with run_eagerly():
        shares = rank_shares(target, head, [text for text in texts if len(text) > depth + 1], depth)
        line = CandidateTree.from_paths(chain(depth), device=model.device)
        tree = CandidateTree.from_paths(best_paths(shares, TREE_NODES), device=model.device)
        torch.manual_seed(build.seed)
        measured = {
            "chain": measure_draft(target, head, prompts, line, max_new_tokens=NEW_TOKENS),
            "tree": measure_draft(target, head, prompts, tree, max_new_tokens=NEW_TOKENS),
            "sampled chain": measure_draft(target, head, prompts, line, max_new_tokens=NEW_TOKENS, temperature=1.0),
        }
    return {name: one.as_dict() for name, one in measured.items()}


def _held_out(options: RunOptions) -> Examples:
    """Return the held-out examples, or those of training if none are held out. Raises UserError for streamed data."""
    tokenizer = load_tokenizer(options.build.model).tokenizer
    data = prepare(options.data_options, tokenizer, seed=options.build.seed)
    found = data.eval or data.examples_in_memory
    if found is None:
        raise UserError(
            "data.streaming: streamed data holds nothing out to measure the head on.", hint="Give data.eval_datasets."
        )
    return found


def _few(examples: Examples, most: int) -> int:
    return min(most, len(examples))


def measurement_tables(found: Mapping[str, Mapping[str, Any]]) -> Sequence[ResultTable]:
    """Return the accepted drafts by position, and the speeds. found: of `measure_run`."""
    depth = max(one["tree_depth"] for one in found.values())
    accepted = []
    speeds = []
    for name, one in found.items():
        shares = [f"{share:.1%}" for share in one["accepted"]]
        accepted.append([name, *shares, *[""] * (depth - len(shares))])
        text = "sampled" if one["identical"] is None else f"{one['identical']} of {one['prompts']}"
        if one["near_ties"]:
            text += f", {one['near_ties']} differ from a near tie on"
        plain = format_rate(one["plain_tokens_per_second"])
        rate = f"{format_rate(one['tokens_per_second'])} and {plain}: {one['speed_up']:.2f}x"
        speeds.append([name, str(one["tree_nodes"]), f"{one['accepted_length']:.2f}", rate, text])
    header = ("", *(f"draft {position}" for position in range(1, depth + 1)))
    return (
        ResultTable("Accepted drafts, if those before are accepted", accepted, header=header),
        ResultTable(
            "Decoding",
            speeds,
            header=("", "nodes", "tokens per pass", "tokens/s with and without", "texts equal to plain"),
        ),
    )
