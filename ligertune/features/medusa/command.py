"""`ligertune medusa`, and `ligertune generate --medusa`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ligertune.cli.options import CommandPart, GenerateRequest, Json, Overrides
from ligertune.cli.render import console as render
from ligertune.cli.train import Overwrite, Resume, run_overrides, run_recipe
from ligertune.errors import UserError


def medusa(
    recipe: Annotated[Path | None, typer.Argument(help="Recipe (YAML file). Default: a bundled recipe.")] = None,
    heads: Annotated[int | None, typer.Option(help="Number of heads (medusa.num_heads).")] = None,
    layers: Annotated[int | None, typer.Option(help="Residual blocks per head (medusa.num_layers).")] = None,
    stage: Annotated[
        int | None, typer.Option(help="1: train the heads only. 2: train the model and the heads (medusa.stage).")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Hub id or folder of the model.")] = None,
    data: Annotated[str | None, typer.Option(help="Data set: hub id, file or folder.")] = None,
    from_: Annotated[str | None, typer.Option("--from", help="Folder of trained heads to start from.")] = None,
    set_: Overrides = None,
    resume: Resume = None,
    overwrite: Overwrite = False,
    report: Annotated[
        bool, typer.Option("--report", help="Measure the trained heads in output_dir, without training.")
    ] = False,
    json: Json = False,
) -> None:
    """Train Medusa heads for speculative decoding, then measure their accuracy and the decoding speed-up.

    Example: ligertune medusa --heads 5
    """
    from ligertune.launcher.failures import is_started_rank
    from ligertune.recipe.read import load_recipe

    render.people_on_stderr(json)
    path = recipe or default_recipe(stage)
    if recipe is None and not is_started_rank():
        render.text(f"No recipe given: using {path}")
    options = {
        "medusa.num_heads": heads,
        "medusa.num_layers": layers,
        "medusa.stage": stage,
        "medusa.heads_path": from_,
        "model.model_name_or_path": model,
        "data.datasets": None if data is None else f"[{{path: {data!r}}}]",
    }
    given = [f"{key}={value}" for key, value in options.items() if value is not None]
    # --set comes last, so that it wins over the options
    overrides = ["task=medusa", *given, *run_overrides(resume, overwrite, set_), *(set_ or [])]
    loaded = load_recipe(path, overrides=overrides)
    if not report:
        run_recipe(loaded, json)
        return
    from ligertune.cli.render import run_report
    from ligertune.features.medusa.medusa_run import report_on
    from ligertune.launcher.run_lock import locked_folder
    from ligertune.planning.feature_spec import feature_of
    from ligertune.planning.options import RunOptions

    with locked_folder(Path(loaded.checkpoint.output_dir)):
        found = report_on(RunOptions.of(loaded)).as_dict()
    run_report.show_tables(feature_of("medusa").result_tables(found))
    if json:
        render.json_report(found)


def default_recipe(stage: int | None) -> Path:
    """Return the bundled Medusa recipe for this machine: a tiny model if there is no GPU."""
    from ligertune.hardware import this_machine
    from ligertune.recipe.read import bundled

    model = "stories260k" if this_machine().vendor == "cpu" else "qwen2.5-7b"
    return bundled(f"medusa/{model}{'-stage2' if stage == 2 else ''}.yaml")


def decode(
    request: GenerateRequest,
    *,
    medusa: Annotated[bool, typer.Option("--medusa", help="Decode with the Medusa heads that MODEL holds.")] = False,
    acceptance: Annotated[
        Literal["greedy", "typical"],
        typer.Option(help="With --medusa: greedy gives the same text as plain greedy decoding; typical samples."),
    ] = "greedy",
) -> Any:  # answers or None; typer evaluates annotations, and the module of answers imports torch
    """Return the answer to a prompt, decoded with Medusa heads; None without --medusa."""
    if not medusa:
        return None
    unsupported = {
        "--top-p": request.top_p < 1,
        "--image": bool(request.images),
        "--prompts": bool(request.prompts_file),
        "--system": request.system is not None,
    }
    for option, is_given in unsupported.items():
        if is_given:
            raise UserError(f"{option} does not work with --medusa.", hint="Leave one of them out.")
    from ligertune.features.medusa.decode.medusa_generate import choose_acceptance, generate_with_heads

    answer = generate_with_heads(
        request.model,
        request.prompts[0],
        acceptance=choose_acceptance(acceptance, request.temperature),
        seed=request.seed,
        raw=request.raw,
        max_new_tokens=request.max_new_tokens,
        trust_remote_code=request.trust_remote_code,
    )
    return [answer]


PART = CommandPart(train=medusa, decode=decode, order=1)
