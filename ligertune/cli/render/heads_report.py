"""What heads came to, in words."""

from __future__ import annotations

from typing import Any

from ligertune.cli.render import console as render


def report(found: dict[str, Any]) -> None:
    """MedusaReport.as_dict(): a row for each head, then decoding beside plain decoding."""
    rows = [
        [f"head {k}", f"+{k + 1}", f"{100 * top1:.1f} %", f"{100 * top5:.1f} %"]
        for k, (top1, top5) in enumerate(zip(found["top1"], found["top5"], strict=True), start=1)
    ]
    render.text()
    render.columns(f"Heads on {found['measured_on']}", ["", "token", "top-1", "top-5"], rows)
    decoding = found["decoding"]
    if decoding is None:
        return
    prompts = decoding["prompts"]
    render.table(
        "Decoding",
        [
            ("tree", f"{found['tree_nodes']} nodes, {found['tree_depth']} deep"),
            ("accepted length", f"{decoding['accepted_length']:.2f} tokens a pass ({decoding['new_tokens']} tokens)"),
            ("text", f"the same as plain decoding's on {decoding['identical']} of {prompts} prompts"),
            ("tokens/s", f"{decoding['tokens_per_second']:,.0f} with heads, {decoding['plain_tokens_per_second']:,.0f} "
                         f"by plain generate: {decoding['speed_up']:.2f}x (one prompt at a time)"),
        ],
    )  # fmt: skip
