"""README.md of a draft head: its sizes, and the commands that start servers with it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Literal

from huggingface_hub import ModelCardData

from ligertune.errors import printable
from ligertune.features.draft.draft_config import DraftConfig
from ligertune.files.storage import mask_secrets
from ligertune.planning.preflight import looks_local

Layout = Literal["eagle3", "speculators"]


def draft_server_commands(
    config: DraftConfig, address: str, target: str, *, layout: Layout, speculative_tokens: int
) -> list[tuple[str, str]]:
    """Return (server, command) of each server that loads a head in this layout, as its documentation writes it.

    address: folder or hub id of the head; target: of the model that it drafts for.
    """
    options = {"method": "eagle3", "model": address, "num_speculative_tokens": speculative_tokens}
    served = shlex.quote(target)
    found = [("vLLM", f"vllm serve {served} --speculative-config {shlex.quote(json.dumps(options))}")]
    if layout == "speculators" or config.num_layers > 1:  # the others have no further layers, or other ones
        return found
    # a chain: one token a step, and the root of the verification besides
    chain = f"--speculative-num-steps {speculative_tokens} --speculative-eagle-topk 1"
    nodes = f"--speculative-num-draft-tokens {speculative_tokens + 1}"
    head = shlex.quote(address)
    launch = f"python -m sglang.launch_server --model-path {served} --speculative-algorithm EAGLE3"
    found.append(("SGLang", f"{launch} --speculative-draft-model-path {head} {chain} {nodes}"))
    convert = "python convert_hf_to_gguf.py"
    to_gguf = f"{convert} {served} --outtype bf16 --outfile target.gguf"
    head_to_gguf = f"{convert} {head} --outtype bf16 --target-model-dir {served} --outfile draft.gguf"
    start = (
        f"llama-server -m target.gguf -md draft.gguf --spec-type draft-eagle3 --spec-draft-n-max {speculative_tokens}"
    )
    found.append(("llama.cpp", f"{to_gguf} && {head_to_gguf} && {start}"))
    return found


def draft_card(
    config: DraftConfig,
    address: str,
    target: str,
    *,
    layout: Layout,
    speculative_tokens: int,
    training: Sequence[tuple[str, str]] = (),
) -> str:
    """Return the text of README.md. address: what commands call the head; target: folder or hub id of its model.

    training: rows on its training and its acceptance.
    """
    metadata = ModelCardData(
        base_model=None if looks_local(target) else target,
        tags=["ligertune", "speculative-decoding", "eagle3"],
        library_name="speculators" if layout == "speculators" else None,
    )
    share = config.draft_vocab_size / config.vocab_size
    rows = [
        ("Target", target),
        ("Layout", layout),
        ("Layers", f"{config.num_layers}, of hidden size {config.hidden_size}"),
        ("Reads the inputs of the target's layers", ", ".join(map(str, config.layer_ids))),
        ("Draft vocabulary", f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens ({share:.0%})"),
        ("Positions", f"{config.max_position_embeddings:,}"),
        *training,
    ]
    commands = draft_server_commands(config, address, target, layout=layout, speculative_tokens=speculative_tokens)
    lines = [
        "---",
        metadata.to_yaml().strip(),
        "# license: to fill in; the licences of the target and of the data apply",
        "---",
        "",
        f"# Draft head (EAGLE-3) for {target}",
        "",
        "It drafts tokens that the target verifies in one forward pass; the text stays that of the target.",
        "Trained with ligertune.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows),
        "",
        "## How to serve",
        "",
        "```bash",
        *(line for server, command in commands for line in (f"# {server}", command)),
        "```",
        "",
        "It drafts well only for the weights that it was trained with: after fine-tuning the target, train it again.",
    ]
    return mask_secrets(printable("\n".join(lines) + "\n"))
