"""Draft heads in a recipe: the section `draft` and its rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveFloat, PrivateAttr

from ligertune.features.draft.head_folders import head_without_model
from ligertune.features.draft.target_folder import resolve_target
from ligertune.recipe.feature import RecipePart
from ligertune.recipe.rules.rule import NEW_TOKENS, NO_CUDA_GRAPHS, NO_NEW_TOKENS, NO_NOISE, NO_TILES, TILES, Rule, each
from ligertune.recipe.section import FileOrHub, OutputPath, Section, Switch

if TYPE_CHECKING:
    from ligertune.recipe.schema import Recipe


class DraftSpec(Section):
    """EAGLE-3 draft head; read with task: draft."""

    # EAGLE-3 (Li et al. 2025)

    num_layers: Annotated[int, Field(ge=1, le=8)] = 1
    """Decoder layers of the draft head; servers load one."""
    layer_ids: Annotated[tuple[int, int, int], Field(strict=False)] | None = None
    """Layers of the model whose input the head reads, from 0; null: 2, the middle one, the third from last."""
    draft_vocab_size: Annotated[int, Field(ge=1, le=2**24)] | None = 32000
    """Number of tokens that the head can draft: the most frequent trained ones; null: all."""
    steps: Annotated[int, Field(ge=1, le=16)] = 7
    """Steps of training-time test: tokens that the head drafts one after another in training."""
    loss: Literal["eagle", "kl", "acceptance"] = "eagle"
    """eagle: cross entropy with the model's distribution over the draft vocabulary; kl: KL divergence from it; acceptance: -log of the chance that the model accepts a draft."""  # noqa: E501
    decay_coefficient: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    """Weight of the loss of step k, from 0: decay_coefficient to the power k."""
    head_path: FileOrHub | None = None
    """Folder of a draft head to start from, or the run that wrote it."""
    adapter_path: FileOrHub | None = None
    """Folder of an adapter that the model has; found by itself if model.model_name_or_path is one, or its run."""
    load_in_4bit: Switch = False
    """Quantise the model's layers to 4 bits (NF4) while they are loaded; needs bitsandbytes."""
    num_speculative_tokens: Annotated[int, Field(ge=1, le=16)] = 3
    """Tokens that a server drafts at a time: evaluation gives the expected accepted length for them."""
    cache: OutputPath | None = None
    """Folder that keeps the model's states of each example, so that the model runs in the first epoch only."""
    cache_max_gib: PositiveFloat = 100.0
    """Size in GiB above which draft.cache is refused; the plan prints what the data take."""

    _token_counts: tuple[int, ...] = PrivateAttr(default=())

    @property
    def token_counts(self) -> tuple[int, ...]:
        """How often each token is trained in the data, by id; empty if no draft vocabulary is chosen from them."""
        return self._token_counts

    def with_token_counts(self, counts: tuple[int, ...]) -> DraftSpec:
        """Return the section with the counts of the prepared data."""
        counted = self.model_copy()
        counted._token_counts = counts
        return counted


RULES = (
    Rule("method.type: not full, task: draft",
         "{0} is {v[0]}, and with {1}: draft only the draft head trains, whole. Leave {0} out."),
    Rule("draft.draft_vocab_size: not null, task: draft, data.streaming",
         "{0} tokens are chosen from the training data, and {2} does not know them before. "
         "Write draft_vocab_size: null."),
    Rule("draft.cache: not null, task: draft, data.streaming",
         "{0} keeps the states of examples, and {2} does not know them before. Leave one of them out."),
    Rule("draft.num_speculative_tokens: any, draft.steps: any, task: draft",
         "{0} is {v[0]}, and the head is trained and measured for {v[1]} ({1}). Write more steps, or fewer tokens.",
         also=lambda recipe: recipe.section(DraftSpec).num_speculative_tokens > recipe.section(DraftSpec).steps),
    Rule("data.max_length: any, draft.steps: any, task: draft",
         "{0} is {v[0]}, too short for {v[1]} steps ({1}): the last step predicts the token {v[1]} + 1 positions "
         "ahead. Write a larger data.max_length, or fewer steps.",
         also=lambda recipe: recipe.data.max_length < recipe.section(DraftSpec).steps + 2),
    *(
        Rule(f"{key}, task: draft",
             f"{{0}} applies to {what}, and with {{1}}: draft only the draft head trains. Leave {{0}} out.")
        for key, what in (
            ("train.fp8", "the model's layers"),
            ("train.gradient_checkpointing_layers: not all", "layers that save activations"),
            ("train.lr_groups", "parameters of the model"),
        )
    ),
    *(
        Rule(f"{key}, task: draft", "{0} measures a model, and {1} is draft, which trains a draft head. Leave {0} out.")
        for key in ("eval.metric", "eval.tasks")
    ),
    Rule("eval.sample_prompts, task: draft",
         "{0} are answered by the model, which {1}: draft does not change. Leave {0} out."),
    Rule("train.gradient_checkpointing: offload|offload_gate|offload_both, task: draft",
         "{0} is {v[0]}, and with {1}: draft only the steps of the draft head are computed again. Write true."),
    Rule("train.neftune_noise_alpha: not null, task: draft", NO_NOISE),
    Rule("train.torch_compile, task: draft",
         "{0} compiles the model's layers, whose inputs {1}: draft reads. Leave {0} out."),
    Rule("parallel.strategy: deepspeed_zero2|deepspeed_zero3, task: draft",
         "{0} is {v[0]}, and {1}: draft reads the weights of the model's output head itself. Write ddp or fsdp."),
    Rule("parallel.strategy: fsdp, draft.load_in_4bit, task: draft",
         "{0} is fsdp, and weights in 4 bits ({1}) are not sharded. Write ddp, or leave {1} out."),
    Rule("draft.load_in_4bit, task: not draft",
         "{0} is read with task: draft only, and {1} is {v[1]}. Write task: draft, or leave {0} out."),
    Rule("draft.adapter_path: not null, task: not draft",
         "{0} is read with task: draft only, and {1} is {v[1]}. Write task: draft, or leave {0} out."),
    *(Rule(f"{key}, task: draft", NO_NEW_TOKENS) for key in NEW_TOKENS),
    *each(NO_TILES, TILES, ("task: draft", "a draft head is no part of it")),
    *each(NO_CUDA_GRAPHS, "train.cuda_graphs: true", ("task: draft", "{1}: draft computes the labelled rows in parts")),
)  # fmt: skip


def with_target(recipe: Recipe) -> tuple[Recipe, tuple[str, ...]]:
    """Return the recipe with the model, and its adapter, that model.model_name_or_path stands for, and notices."""
    found = resolve_target(recipe.model)
    changes: dict[str, Section] = {"model": found.model}
    if found.adapter is not None:
        changes["draft"] = recipe.section(DraftSpec).model_copy(update={"adapter_path": found.adapter})
    return recipe.model_copy(update=changes), (found.notice,) if found.notice else ()


PART = RecipePart(
    order=6,
    tasks={"draft": "EAGLE-3 draft head"},
    sections={"draft": DraftSpec},
    rules=RULES,
    loss_of_labels=False,
    why_whole_rows="The draft head reads tokens of other processes",
    complete=with_target,
    not_a_model=head_without_model,
    packages={"draft.load_in_4bit": "bitsandbytes"},
    run_files=("draft",),
    report_keys=("draft",),
)
