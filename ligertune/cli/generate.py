"""`ligertune generate`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from ligertune.cli.render import console as render
from ligertune.errors import UserError


def generate(
    model: Annotated[str, typer.Argument(help="Folder of a model (runs/.../model), or a hub id.", show_default=False)],
    prompt: Annotated[str, typer.Argument(help="What to ask or continue; - reads stdin.", show_default=False)],
    image: Annotated[
        list[str] | None,
        typer.Option("--image", help="A picture that it is shown; may be given again.", show_default=False),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without a prompt template.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The most tokens to write.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 picks the likeliest token each time.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Sample from this share of the probability.")] = 1.0,
    medusa: Annotated[bool, typer.Option("--medusa", help="MODEL holds Medusa heads: decode with them.")] = False,
    acceptance: Annotated[
        Literal["greedy", "typical"],
        typer.Option(help="With --medusa: greedy writes what plain decoding would; typical samples."),
    ] = "greedy",
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 42,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON report on stdout.")] = False,
) -> None:
    """Answer or continue a prompt with a trained model, in the words of the template it was trained with.

    Example: ligertune generate runs/quickstart/model 'Name three colours.'

    Of a model that sees: ligertune generate runs/seeing/model 'What is this?' --image photo.jpg
    """
    import sys

    from ligertune.planning.preflight import check_model_path

    if not medusa:
        check_model_path(model, key="MODEL")
    if prompt == "-":
        prompt = sys.stdin.read()

    images = list(image or [])
    render.people_on_stderr(json)
    if medusa:
        if top_p < 1:
            raise UserError("--top-p goes with plain decoding, not with --medusa.", hint="Leave one of them out.")
        if images:
            raise UserError("--image goes with plain decoding, not with --medusa.", hint="Leave one of them out.")
        from ligertune.decode.medusa_generate import choose_acceptance, complete_with_heads

        rule = choose_acceptance(acceptance, temperature)
        answer = complete_with_heads(model, prompt, raw=raw, max_new_tokens=max_new_tokens, acceptance=rule, seed=seed)
    else:
        from ligertune.decode.generate import complete

        answer = complete(
            model,
            prompt,
            images=images,
            raw=raw,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
        )
    if json:
        render.json_report(answer.as_dict())
    else:
        render.document(answer.text)
    if medusa:
        render.note(
            f"{answer.new_tokens} tokens, {answer.accepted_length:.2f} a pass, {answer.tokens_per_second:,.0f} tokens/s"
        )
