"""`ligertune sample` step by step: prompts -> answers -> scores -> kept rows -> report."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligertune.any_types import AnyModule
from ligertune.decode.sampling import sampling_notes
from ligertune.errors import UserError
from ligertune.features.sample.answer_files import (
    KEPT_FILE,
    REPORT_FILE,
    SCORED_FILE,
    SPEED_FILES,
    AnswerWriter,
    StoredAnswer,
    check_answer_folder,
    claim_folder,
    fingerprint,
    read_answers,
    remove_answers,
)
from ligertune.features.sample.keep_answers import RatedAnswer, keep_rows
from ligertune.features.sample.local_source import LocalSource, answers_of, check_answers_fit, seed_of
from ligertune.features.sample.recipe import FOLDER_KEY, SampleSpec
from ligertune.features.sample.sample_prompts import SamplePrompts, read_prompts
from ligertune.features.sample.sample_report import (
    SampleReport,
    Speed,
    distribution,
    examples,
    histogram,
    notes_on,
    score_parts,
)
from ligertune.features.sample.scoring.score_functions import ScoreFunctions
from ligertune.features.sample.scoring.score_model import ScoreModel, score_model_name
from ligertune.features.sample.url_source import UrlSource, answers_of_server
from ligertune.files.storage import finite, read_object, write_bytes, write_json, writing
from ligertune.launcher.run_lock import locked_folder
from ligertune.planning.options import RunOptions
from ligertune.planning.saved_model import check_can_generate, find_saved_model
from ligertune.recipe.read import recipe_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ligertune.recipe.schema import Recipe

SCORED_AT_ONCE = 512  # answers of one call of a score function, all answers of a prompt together
_SCORE_MODEL = "score_model"  # its name among the functions
# what the answers depend on; the other keys of the section may change between two calls
_SETTINGS = ("num_generations", "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "seed", "url",
             "url_model")  # fmt: skip

Progress = Callable[[float], None]


@dataclass(frozen=True)
class SampleJob:
    """What is sampled: the source, its prompts, and the folder of the answers. tokenizer: None if a server answers."""

    options: RunOptions
    spec: SampleSpec
    source: LocalSource | None
    tokenizer: PreTrainedTokenizerBase | None
    found: SamplePrompts
    folder: Path

    @property
    def source_name(self) -> str:
        """The model or server that answers."""
        return str(self.spec.url) if self.source is None else self.source.name


def output_folder(options: RunOptions) -> Path:
    """Return the folder of answers: sample.output_dir, or one next to checkpoint.output_dir."""
    named = options.build.section(SampleSpec).output_dir
    return Path(named or f"{options.checkpoint.output_dir.rstrip('/')}-samples")


def sample_recipe(
    recipe: Recipe | str | os.PathLike[str] | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    overwrite: bool = False,
) -> SampleReport:
    """Do in this process what `ligertune sample` does, and return its report.

    recipe: a path, the sections as a mapping, or a loaded recipe. overwrite: remove the answers of an earlier call.
    Raises UserError.
    """
    options = RunOptions.of(recipe_of(recipe, overrides, output_key=FOLDER_KEY))
    spec = options.build.section(SampleSpec)
    with (
        ScoreFunctions(spec.score, spec.score_timeout) as functions,
        open_job(options, functions, overwrite=overwrite) as job,
    ):
        generate(job, lambda share: None)
        return score_and_keep(job, functions, lambda share: None)


@contextlib.contextmanager
def open_job(
    options: RunOptions, functions: ScoreFunctions, *, overwrite: bool, processes: Sequence[int] = ()
) -> Iterator[SampleJob]:
    """Check everything before a model is loaded, and hold the lock of the folder. Raises UserError.

    processes: others that write answers, as ids.
    """
    # cheap checks come first: reading the data may take minutes
    _check_scores(options.build.section(SampleSpec))
    folder = output_folder(options)
    check_answer_folder(folder, FOLDER_KEY)
    job = prepare_sampling(options)
    functions.check_columns(column_names(job))
    with locked_folder(folder, processes=processes, key=FOLDER_KEY):
        if overwrite:
            remove_answers(folder)
        _claim(job)
        for path in folder.glob(SPEED_FILES):  # of an earlier call
            path.unlink()
        yield job


def _check_scores(spec: SampleSpec) -> None:
    """Raise UserError if answers should be chosen by scores, and nothing scores them."""
    if spec.keep != "all" and not spec.score and spec.score_model is None:
        raise UserError(
            f"sample.keep: {spec.keep} chooses by scores, and nothing scores the answers.",
            hint="Give sample.score: file.py:function or sample.score_model, or write sample.keep: all.",
        )


def prepare_sampling(options: RunOptions) -> SampleJob:
    """Find the source, and read the prompts of the recipe's data. Raises UserError."""
    spec = options.build.section(SampleSpec)
    if spec.score_model is not None:
        score_model_name(spec.score_model)
    source = None
    tokenizer = None
    if spec.url is None:
        saved = None
        if spec.source is not None:
            chosen = find_saved_model(spec.source, key="sample.source")
            check_can_generate(chosen, key="sample.source")
            saved = chosen.name
        source = LocalSource(options.build, saved)
        source.config()
        tokenizer = source.tokenizer()
    elif options.data_options.chat_template_kwargs:
        raise UserError(
            "data.chat_template_kwargs are for the template of a model that runs here, and sample.url names a server.",
            hint="Leave them out.",
        )
    found = read_prompts(options.data_options, tokenizer)
    forms = sorted({prompt.form for prompt in found.prompts})
    if len(forms) > 1:
        raise UserError(
            f"data.datasets: some prompts are rendered as {forms[0]} and others as {forms[1]}, and the kept rows have "
            "one format.",
            hint="Write data.prompt_template, or a recipe for each.",
        )
    if source is not None:
        check_answers_fit(source.config(), found, spec)
    return SampleJob(options, spec, source, tokenizer, found, output_folder(options))


def _claim(job: SampleJob) -> None:
    """Record the settings of the answers in the folder, or compare them with those there. Raises UserError."""
    settings: dict[str, Any] = {name: getattr(job.spec, name) for name in _SETTINGS}
    settings |= {} if job.source is None else job.source.about()
    # prompts for a server have no token ids
    asked = [prompt.ids or [prompt.turns, prompt.tools] for prompt in job.found.prompts]
    settings |= {"prompts": len(asked), "prompts_version": fingerprint(asked)}
    if job.source is None:
        settings["system_prompt"] = job.options.data_options.system_prompt
    claim_folder(job.folder, settings, FOLDER_KEY)


# ---- answers


def missing_answers(job: SampleJob, rank: int = 0, world: int = 1) -> list[tuple[int, list[int]]]:
    """Return (prompt, numbers of its missing answers) of this process's share of the prompts."""
    done = read_answers(job.folder).keys()
    numbers = range(job.spec.num_generations)
    found = []
    # in turn: data files are often sorted, and each process gets prompts of all their parts
    for place in range(rank, len(job.found.prompts), world):
        left = [number for number in numbers if (place, number) not in done]
        if left:
            found.append((place, left))
    return found


def generate(job: SampleJob, progress: Progress, *, rank: int = 0, world: int = 1) -> None:
    """Generate this process's missing answers, and write each as it finishes."""
    missing = missing_answers(job, rank, world)
    if not missing:
        return
    total = sum(len(numbers) for _, numbers in missing)
    made = 0
    tokens = 0
    # a model is loaded here, before the time begins
    answers = _of_server(job, missing) if job.source is None else _of_model(job, job.source, missing)
    writer = AnswerWriter(job.folder / f"answers-{rank}.jsonl")
    begun = time.perf_counter()
    with contextlib.closing(writer), sampling_notes() as notes:
        for answer in answers:
            writer.add(answer)
            made += 1
            tokens += answer.tokens
            progress(made / total)
    write_json(
        job.folder / f"speed-{rank}.json", {"tokens": tokens, "seconds": time.perf_counter() - begun, "notes": notes}
    )


def _of_model(
    job: SampleJob, source: LocalSource, missing: Sequence[tuple[int, Sequence[int]]]
) -> Iterator[StoredAnswer]:
    """Load the model, and return an iterator of its answers."""
    return _answers_of_model(job, source, source.load(), missing)


def _answers_of_model(
    job: SampleJob, source: LocalSource, model: AnyModule, missing: Sequence[tuple[int, Sequence[int]]]
) -> Iterator[StoredAnswer]:
    assert job.tokenizer is not None
    places = [place for place, _ in missing]
    wanted = {(place, number) for place, numbers in missing for number in numbers}
    # all answers of a prompt again: those that are on the disk are passed over
    for answer in answers_of(source, model, job.tokenizer, job.found, places, spec=job.spec):
        place = places[answer.prompt]
        if (place, answer.number) in wanted:
            yield StoredAnswer(
                prompt=place,
                number=answer.number,
                text=answer.text,
                finish=answer.finish,
                tokens=len(answer.ids),
                ids=answer.ids,
                log_probs=answer.log_probs,
            )


def _of_server(job: SampleJob, missing: Sequence[tuple[int, Sequence[int]]]) -> Iterator[StoredAnswer]:
    source = UrlSource(job.spec, job.options.data_options.system_prompt)

    def seed(place: int, number: int) -> int:
        return seed_of(job.spec.seed, place * job.spec.num_generations + number) % 2**31

    try:
        for place, number, answer in answers_of_server(source, job.found.prompts, missing, seed, job.spec.url_requests):
            yield StoredAnswer(place, number, answer.text, answer.finish, answer.tokens)
    finally:
        source.close()


def _measured(folder: Path) -> tuple[Speed, list[str]]:
    """Return the tokens of all processes of this call with the seconds of the slowest, and their notes."""
    found = [read_object(path) or {} for path in sorted(folder.glob(SPEED_FILES))]
    tokens = sum(one.get("tokens", 0) for one in found)
    notes = [note for one in found for note in one.get("notes", ())]
    return Speed(tokens, max((one.get("seconds", 0.0) for one in found), default=0.0)), list(dict.fromkeys(notes))


# ---- scores


def score_all(job: SampleJob, functions: ScoreFunctions, progress: Progress) -> list[RatedAnswer]:
    """Return all answers with their scores, in the order of prompts and answers. Raises UserError."""
    answers = list(read_answers(job.folder).values())
    expected = len(job.found.prompts) * job.spec.num_generations
    if len(answers) != expected:
        raise UserError(
            f"{FOLDER_KEY}: {job.folder} holds {len(answers):,} of {expected:,} answers.",
            hint="Run the command again to continue.",
            exit_code=1,
        )
    scores: list[dict[str, float]] = [{} for _ in answers]
    weights = dict(zip(functions.names, functions.weights, strict=True))
    if functions.names:
        _score_by_functions(job, functions, answers, scores, progress)
    if job.spec.score_model is not None:
        _score_by_model(job, answers, scores, progress)
        weights[_SCORE_MODEL] = 1.0
    rated = []
    for answer, own in zip(answers, scores, strict=True):
        total = sum(weights[name] * score for name, score in own.items()) if weights else None
        rated.append(RatedAnswer(job.found.prompts[answer.prompt], answer, total, own))
    return rated


def _score_by_functions(
    job: SampleJob,
    functions: ScoreFunctions,
    answers: Sequence[StoredAnswer],
    scores: Sequence[dict[str, float]],
    progress: Progress,
) -> None:
    each = job.spec.num_generations
    size = max(1, SCORED_AT_ONCE // each) * each
    for start in range(0, len(answers), size):
        part = answers[start : start + size]
        prompts = [job.found.prompts[answer.prompt] for answer in part]
        columns: dict[str, list[Any]] = defaultdict(list)
        for name in column_names(job):
            columns[name] = [prompt.columns.get(name) for prompt in prompts]
        completions = [prompt.completion(answer.text) for prompt, answer in zip(prompts, part, strict=True)]
        found = functions(completions, [prompt.scored for prompt in prompts], columns)
        for name, values in zip(functions.names, found, strict=True):
            for place, value in enumerate(values, start=start):
                scores[place][name] = value
        progress((start + len(part)) / len(answers))


def _score_by_model(
    job: SampleJob, answers: Sequence[StoredAnswer], scores: Sequence[dict[str, float]], progress: Progress
) -> None:
    assert job.spec.score_model is not None
    model = ScoreModel(
        score_model_name(job.spec.score_model),
        job.options.data_options,
        job.found.prompts[0].form,
        trust_remote_code=job.options.build.model.trust_remote_code,
    )
    prompts = [job.found.prompts[answer.prompt] for answer in answers]
    found = model(prompts, [answer.text for answer in answers], progress)
    for own, value in zip(scores, found, strict=True):
        own[_SCORE_MODEL] = value


def column_names(job: SampleJob) -> list[str]:
    """Return the columns that score functions get: those of the rows, without prompt and completion, as in TRL."""
    names = {name for prompt in job.found.prompts for name in prompt.columns}
    return sorted(names - {"prompt", "prompts", "completion", "completions"})


# ---- results


def score_and_keep(job: SampleJob, functions: ScoreFunctions, progress: Progress) -> SampleReport:
    """Score all answers, write the scored and the kept ones, and return the report. Raises UserError."""
    rated = score_all(job, functions, progress)
    _write_lines(job.folder / SCORED_FILE, [one.as_dict() for one in rated])
    kept = keep_rows(job.spec, rated)
    _write_lines(job.folder / KEPT_FILE, kept.rows)
    report = _report(job, rated, kept)
    with writing(str(job.folder / REPORT_FILE), trains=False):
        write_json(job.folder / REPORT_FILE, report.as_dict())
    return report


def _report(job: SampleJob, rated: Sequence[RatedAnswer], kept: Any) -> SampleReport:
    scores = [one.score for one in rated if one.score is not None]
    functions, best_of = score_parts(rated)
    best, worst = examples(rated)
    answers = [one.answer for one in rated]
    speed, notes = _measured(job.folder)
    return SampleReport(
        source=job.source_name,
        prompts=len(job.found.prompts),
        answers=len(rated),
        num_generations=job.spec.num_generations,
        keep=job.spec.keep,
        kept=len(kept.rows),
        score=distribution(scores) if scores else None,
        histogram=histogram(scores) if scores else None,
        functions=functions,
        best_of=best_of,
        tokens=distribution([answer.tokens for answer in answers]),
        truncated_share=sum(answer.finish == "length" for answer in answers) / len(answers),
        speed=speed,
        best=best,
        worst=worst,
        rows_read=job.found.rows_read,
        dropped=dict(job.found.dropped.most_common()),
        notes=[*job.found.notes, *notes, *notes_on(job.spec, kept, rated)],
        files={"kept": str(job.folder / KEPT_FILE), "scored": str(job.folder / SCORED_FILE)},
    )


def _write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    lines = (json.dumps(finite(row), ensure_ascii=False, default=str) for row in rows)
    with writing(str(path), trains=False):
        write_bytes(path, "".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))
