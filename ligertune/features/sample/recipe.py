"""Sampled answers in a recipe: the section `sample` and its rules. It is read by `ligertune sample` only."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from ligertune.recipe.feature import RecipePart
from ligertune.recipe.rules.rule import ONE_OUT, Rule
from ligertune.recipe.section import FileFunction, FileOrHub, OneOrMore, OutputPath, Section, ShareBelowOne, Text

FOLDER_KEY = "sample.output_dir"


class ScoreFunctionSpec(Section):
    """A function that scores answers, and its weight in the sum of all scores."""

    function: FileFunction
    """file.py:function: called as function(completions, prompts, **columns of the data); the file is executed."""
    weight: float = 1.0
    """What its scores are multiplied by in the sum."""


def _as_functions(given: Any) -> Any:
    """Read file.py:function, or one {function, weight}, as a list of it, and names in a list as functions."""
    rows = [given] if isinstance(given, str | dict) else given
    if not isinstance(rows, list | tuple):
        return rows
    return [{"function": row} if isinstance(row, str) else row for row in rows]


ScoreFunctions = Annotated[tuple[ScoreFunctionSpec, ...], Field(strict=False), BeforeValidator(_as_functions)]


class SampleSpec(Section):
    """Answers of a model to the prompts of data.datasets; read by `ligertune sample`."""

    num_generations: Annotated[int, Field(ge=1, le=2**16)] = 8
    """Answers to each prompt."""
    max_new_tokens: Annotated[int, Field(ge=1, le=2**20)] = 256
    """Maximum number of tokens of an answer."""
    temperature: NonNegativeFloat = 1.0
    """Divisor of the logits; 0: the most probable token."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Choose among the most probable tokens whose probabilities sum to this; 1: all."""
    top_k: NonNegativeInt = 0
    """Choose among this many of the most probable tokens; 0: all."""
    min_p: ShareBelowOne = 0.0
    """Choose among tokens with at least this share of the highest probability; 0: all."""
    stop: Annotated[tuple[Text, ...], Field(strict=False), OneOrMore] = ()
    """Texts that end an answer; they are not part of it."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Random seed; each prompt has its own, derived from this one and its place."""
    generation_batch_size: PositiveInt | None = None
    """Answers that are generated at a time, per process; null: as many as have room."""
    source: FileOrHub | None = None
    """The model that answers: a run, a model, an adapter, or a hub id; null: model.model_name_or_path."""
    url: Text | None = None
    """Address of an OpenAI-compatible server that answers, up to /v1: http://localhost:8000/v1."""
    url_model: Text | None = None
    """Name of the model that the server is asked for."""
    url_key_variable: Text = "OPENAI_API_KEY"
    """Environment variable with the key for the server; without a value none is sent."""
    url_timeout: Annotated[float, Field(gt=0.0, le=86400.0)] = 120.0
    """Seconds that one request may take."""
    url_retries: Annotated[int, Field(ge=0, le=100)] = 5
    """Further tries after a time-out, a lost connection, or the status 429 or 5xx."""
    url_requests: Annotated[int, Field(ge=1, le=1024)] = 8
    """Requests that are open at a time; each asks for all answers to one prompt."""
    score: ScoreFunctions = ()
    """file.py:function, or a list of {function, weight}: scores of answers, higher is better; see docs/sampling.md."""
    score_timeout: PositiveFloat = 60.0
    """Seconds that a function may take for one call, which scores up to 512 answers."""
    score_model: FileOrHub | None = None
    """A run that was trained on pairs to score texts, or such a model; its score is added to those of the functions."""
    keep: Literal["best", "above", "pairs", "all"] = "best"
    """best: of each prompt; above: those with threshold or more; pairs: best and worst as chosen and rejected."""
    threshold: float | None = None
    """The lowest score that is kept; with keep: pairs of the chosen answer; null: any."""
    output_dir: OutputPath | None = None
    """Folder of answers, scores and report; null: checkpoint.output_dir with -samples at its end."""


RULES = (
    Rule("sample.keep: above, sample.threshold: null", "{0} is above, and {1} is not given. Give the lowest score."),
    Rule("sample.threshold: not null, sample.keep: all",
         "{0} is the lowest score that is kept, and {1} is all. Write sample.keep: above, or leave {0} out."),
    Rule("sample.keep: pairs, sample.num_generations: 1",
         "{0} is pairs, and {1} is 1: a pair needs two answers. Write a larger {1}."),
    Rule("sample.num_generations: not 1, no sample.temperature",
         "{0} is {v[0]}, and with {1} 0 all answers to a prompt are equal. Write a higher {1}, or {0}: 1."),
    Rule("sample.source: not null, sample.url: not null", f"{{0}} and {{1}} both say who answers. {ONE_OUT}"),
    Rule("sample.url: not null, sample.url_model: null", "{0} is given, and {1} is not. Name the server's model."),
    Rule("sample.url_model: not null, sample.url: null", "{0} is given, and {1} is not. Give the server's address."),
    Rule("sample.url: not null, sample.generation_batch_size: not null",
         "{0} asks a server, and {1} is for a model that runs here. Write sample.url_requests in its place."),
)  # fmt: skip

PART = RecipePart(order=5, sections={"sample": SampleSpec}, rules=RULES)
