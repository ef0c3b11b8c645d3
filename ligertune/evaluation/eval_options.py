"""Options of `ligertune eval`, which are checked before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass

from ligertune.errors import UserError

# sections of a recipe that an evaluation does not read
_NOT_READ = ("train", "checkpoint", "logging", "parallel", "report", "method", "task", "eval")


@dataclass(frozen=True)
class EvalOptions:
    """The options of `ligertune eval` that say what is evaluated.

    data: paths or hub ids; none: the evaluation data of the recipe. split: of `data`. max_samples: rows of each data
    set, or documents of each task. tasks: of lm-evaluation-harness, in place of data. overrides: of the recipe of the
    evaluation, as --set. metric, max_new_tokens: of answers; None: those of the run.
    """

    data: tuple[str, ...] = ()
    split: str = "train"
    max_samples: int | None = None
    batch_size: int | None = None
    overrides: tuple[str, ...] = ()
    trust_remote_code: bool = False
    tasks: tuple[str, ...] = ()
    include_path: str | None = None
    num_fewshot: int | None = None
    chat_template: bool = False
    metric: str | None = None
    max_new_tokens: int | None = None

    def check(self) -> None:
        """Raise UserError for options that an evaluation does not read."""
        for text in self.overrides:
            section = text.partition(".")[0].partition("=")[0].strip()
            if section in _NOT_READ:
                raise UserError(
                    f"--set {text}: an evaluation takes {section} from the run, or does not read it.",
                    hint="Leave it out. It reads the sections data, model and kernels.",
                )
        if self.split != "train" and not self.data:
            raise UserError("--split belongs to --data.", hint="Name the data set: --data PATH.")
        if self.tasks and self.metric is not None:
            raise UserError("--metric scores answers to data, and --tasks reads none.", hint="Leave one out.")
        if self.tasks and self.data:
            raise UserError("--tasks and --data both say what is evaluated.", hint="Leave one out.")
        of_tasks = {
            "--include-path": self.include_path is not None,
            "--num-fewshot": self.num_fewshot is not None,
            "--chat-template": self.chat_template,
        }
        for option, is_given in of_tasks.items():
            if is_given and not self.tasks:
                raise UserError(f"{option} belongs to --tasks.", hint="Name the tasks: --tasks NAME.")
