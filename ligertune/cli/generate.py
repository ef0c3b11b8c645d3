"""`ligertune generate`: answer one prompt, with plain decoding or with Medusa heads."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import typer

from ligertune.cli.options import Json
from ligertune.cli.render import console as render
from ligertune.errors import UserError, plural


def generate(
    model: Annotated[str, typer.Argument(help="Folder of a model (runs/.../model), or a hub id.", show_default=False)],
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.", show_default=False)],
    image: Annotated[
        list[str] | None,
        typer.Option("--image", help="Image file for a vision-language model. May be repeated.", show_default=False),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without a prompt template.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of new tokens.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy decoding.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus sampling: keep this probability mass.")] = 1.0,
    medusa: Annotated[bool, typer.Option("--medusa", help="Decode with the Medusa heads that MODEL holds.")] = False,
    acceptance: Annotated[
        Literal["greedy", "typical"],
        typer.Option(help="With --medusa: greedy gives the same text as plain greedy decoding; typical samples."),
    ] = "greedy",
    seed: Annotated[int, typer.Option(help="Seed for sampling.")] = 42,
    json: Json = False,
) -> None:
    """Answer or continue a prompt, using the prompt template that the model was trained with.

    Example: ligertune generate runs/quickstart/model 'Name three colours.'

    With an image: ligertune generate runs/qwen2-vl/model 'What is this?' --image photo.jpg
    """
    from dataclasses import asdict

    from ligertune.planning.preflight import check_model_path

    if prompt == "-":
        prompt = sys.stdin.read()
    render.people_on_stderr(json)
    common = {"raw": raw, "max_new_tokens": max_new_tokens, "seed": seed}
    if medusa:
        for option, given in (("--top-p", top_p < 1), ("--image", bool(image))):
            if given:
                raise UserError(f"{option} does not work with --medusa.", hint="Leave one of them out.")
        from ligertune.decode.medusa_generate import choose_acceptance, generate_with_heads

        answer = generate_with_heads(model, prompt, acceptance=choose_acceptance(acceptance, temperature), **common)
    else:
        check_model_path(model, key="MODEL")  # before torch is imported, which takes seconds
        from ligertune.decode.generate import generate_answer

        answer = generate_answer(
            model, prompt, images=list(image or []), temperature=temperature, top_p=top_p, **common
        )
    if json:
        render.json_report(asdict(answer))
    else:
        render.document(answer.text)
    if medusa:
        speed = f"{answer.accepted_length:.2f} tokens per forward pass, {answer.tokens_per_second:,.0f} tokens/s"
        render.note(f"{plural(answer.new_tokens, 'token')}, {speed}")
