"""`ligertune generate RUN --draft DRAFT`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ligertune.cli.options import CommandPart, GenerateRequest
from ligertune.errors import UserError


def answer_with_draft(
    request: GenerateRequest,
    *,
    draft: Annotated[
        str | None,
        typer.Option("--draft", metavar="DRAFT", help="Decode with the draft head in this folder.", show_default=False),
    ] = None,
    draft_tokens: Annotated[
        int, typer.Option(min=1, max=32, help="With --draft: tokens that the head drafts per forward pass.")
    ] = 3,
) -> Any:  # an Answer or None; typer evaluates annotations, and the module of Answer imports torch
    """Return the answer to a prompt, decoded with a draft head; None without --draft."""
    if draft is None:
        return None
    unsupported = {
        "--top-p": request.top_p < 1,
        "--image": bool(request.images),
        "--prompts": bool(request.prompts_file),
    }
    for option, is_given in unsupported.items():
        if is_given:
            raise UserError(f"{option} does not work with --draft.", hint="Leave one of them out.")
    from ligertune.planning.saved_model import check_can_generate, find_saved_model

    saved = find_saved_model(request.model, key="MODEL")
    check_can_generate(saved, key="MODEL")
    from ligertune.decode.generate import Decoding, load_model
    from ligertune.features.draft.decode.draft_generate import generate_with_draft, load_draft

    loaded = load_model(saved.name, raw=request.raw, trust_remote_code=request.trust_remote_code)
    if request.system is not None:
        loaded = loaded.with_system(request.system)
    head = load_draft(draft, loaded)
    decoding = Decoding(request.max_new_tokens, request.temperature)
    prompt = request.prompts[0]
    return generate_with_draft(loaded, head, prompt, decoding, draft_tokens=draft_tokens, seed=request.seed)


PART = CommandPart(decode=answer_with_draft, order=4)
