"""Job: the plan of a run with the configuration, tokenizer, data and image reader that it was made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ligertune.data.prepare import PreparedData
    from ligertune.models.load import LoadedTokenizer
    from ligertune.planning.plan import Plan
    from ligertune.vision.reader import ImageReader


@dataclass(frozen=True)
class Job:
    """Everything that a run needs except its model. `run.plan_for` returns it."""

    plan: Plan
    config: PreTrainedConfig
    tokenizer: LoadedTokenizer
    data: PreparedData
    images: ImageReader | None = None  # only for vision-language models

    @property
    def prompt(self) -> dict[str, str | None]:
        """Prompt template and system prompt: saved with the model, and used for its sample answers."""
        template = {"alpaca": "alpaca", "plain": "raw"}.get(self.data.template, "chat")
        return {"prompt_template": template, "system_prompt": self.plan.data_options.system_prompt}
