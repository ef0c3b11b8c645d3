"""Rules of the keys that belong to one task: Medusa heads, distillation, preferences, classification and rewards."""

from __future__ import annotations

from functools import partial

from ligertune.recipe.rules.rule import ADAPTER, ONE_OUT, Rule, each
from ligertune.recipe.schema import Recipe
from ligertune.recipe.train_sections import DistillSpec, PreferenceSpec

# keys of `preference` that only some losses read
READ_BY_LOSSES = {
    "beta": "sigmoid|ipo|hinge|robust|simpo|kto",
    "label_smoothing": "sigmoid|robust",
    "simpo_gamma": "simpo",
    "orpo_alpha": "orpo",
    "sft_weight": "sigmoid|ipo|hinge|robust|simpo",
    "ld_alpha": "sigmoid|ipo|hinge|robust",
    "length_normalization": "sigmoid|hinge|robust",
    "desirable_weight": "kto",
    "undesirable_weight": "kto",
    "reference": "sigmoid|ipo|hinge|robust|kto",
}
# keys that only one of the tasks with a score head reads
SCORE_KEYS = {
    "classification": tuple(f"classification.{key}" for key in ("num_labels", "problem_type", "labels")),
    "reward": ("reward.center_rewards_coefficient",),
}
MEDUSA_STAGE_1 = "medusa.stage: 1, task: medusa"


def _differs(key: str, recipe: Recipe) -> bool:
    """Report whether a key of `preference` has another value than its default."""
    return getattr(recipe.preference, key) != PreferenceSpec.model_fields[key].default


def _listed(values: str) -> str:
    return " and ".join(values.replace("|", ", ").rsplit(", ", 1))


TASK_RULES = (
    # ---- Medusa heads
    Rule("medusa.stage: 2, medusa.heads_path: null, task: medusa",
         "{0} is 2, which starts from trained heads, and {1} is not given. "
         "Train the heads with medusa.stage: 1 first, and give their folder."),
    Rule("data.max_length: any, medusa.num_heads: any, task: medusa",
         "{0} is {v[0]}, too short for {v[1]} heads ({1}): the last head predicts the token {v[1]} + 1 positions "
         "ahead. Write a larger data.max_length, or fewer heads.",
         also=lambda recipe: recipe.data.max_length < recipe.medusa.num_heads + 2),
    Rule("method.type: qlora|freeze, task: medusa",
         "{0} is {v[0]}, and {1} is medusa, which supports full and lora only. Write one of them."),
    Rule(f"method.type: lora, {MEDUSA_STAGE_1}",
         "{0} is lora, and in stage 1 ({1}) only the heads train. Leave {0} out, or write medusa.stage: 2."),
    *(
        Rule(f"{key}, {MEDUSA_STAGE_1}",
             f"{{0}} applies to {what}, and in stage 1 ({{1}}) only the heads train. Leave {{0}} out.")
        for key, what in (
            ("train.fp8", "the model's layers"),
            ("train.gradient_checkpointing_layers: not all", "layers that save activations"),
        )
    ),
    # ---- distillation
    Rule("distill.teacher: null, task: distill, distill.teacher_file: null",
         "{1} is distill, and {0} is not given. Give a hub id or a folder."),
    *each(
        "{0} trains from written log-probabilities, and {1}: {v[1]} {why}",
        "distill.teacher_file: not null",
        ("distill.loss: not forward_kl", "needs all of them. Write distill.loss: forward_kl."),
        ("data.streaming", "does not know its tokens before. " + ONE_OUT),
    ),
    Rule("distill.teacher_file: not null, task: not distill",
         "{0} is read with task: distill only, and {1} is {v[1]}. Write task: distill, or leave {0} out."),
    Rule("distill.teacher: not null, task: not distill",
         "{0} is read with task: distill only, and {1} is {v[1]}. Write task: distill, or leave {0} out."),
    Rule("distill.beta: any, distill.loss: not jsd",
         "{0} weights the mixture of jsd, and {1} is {v[1]}. Leave {0} out.",
         also=lambda recipe: recipe.distill.beta != DistillSpec.model_fields["beta"].default),
    Rule("distill.sft_weight: 1, task: distill",
         "{0} is 1, which leaves nothing of the teacher. Write a smaller weight, or task: sft without a teacher."),
    Rule("distill.teacher_offload, distill.teacher_load_in_4bit",
         f"{{0}} copies layers as they are, and {{1}} packs their weights. {ONE_OUT}"),
    Rule("kernels.loss: cross_entropy, task: distill, kernels.enabled: not false",
         "{0} is cross_entropy, and {1} is distill, whose loss is a divergence. Leave {0} out."),
    # ---- preference optimisation
    *(
        Rule(f"preference.{key}: any, preference.loss_type: not {losses}, task: dpo",
             f"{{0}} has no effect on {{1}}: {{v[1]}}. It is read with {_listed(losses)}. Leave {{0}} out.",
             also=partial(_differs, key))
        for key, losses in READ_BY_LOSSES.items()
    ),
    Rule("preference.loss_type: not sigmoid, task: not dpo",
         "{0} is {v[0]}, which is read with task: dpo only, and {1} is {v[1]}. Write task: dpo, or leave {0} out."),
    Rule("preference.reference: adapter, method.type: not lora|qlora, task: dpo",
         "{0} is adapter, which switches a LoRA adapter off, and {1} is {v[1]}. "
         "Write preference.reference: precompute."),
    Rule(f"preference.reference: copy, {ADAPTER}, task: dpo",
         "{0} is copy, and {1} is {v[1]}, whose model without the adapter is that copy. "
         "Write preference.reference: adapter."),
    Rule("preference.reference: copy, parallel.strategy: fsdp, task: dpo",
         "{0} is copy, which needs a whole model on each process, and {1} is fsdp, which shards it. "
         "Write preference.reference: precompute."),
    # ---- sequence classification and reward models
    *(
        Rule(f"{key}: not null, task: not {task}",
             f"{{0}} is read with task: {task} only, and {{1}} is {{v[1]}}. Write task: {task}, or leave {{0}} out.")
        for task, keys in SCORE_KEYS.items() for key in keys
    ),
    Rule("classification.num_labels: not null, classification.labels: not null",
         "{0} is {v[0]}, and {1} has another number of names. Leave {0} out.",
         also=lambda recipe: recipe.classification.num_labels != len(recipe.classification.labels)),
    Rule("classification.labels: not null",
         "{0} has a name twice. Give each label another name.",
         also=lambda recipe: len(set(recipe.classification.labels)) < len(recipe.classification.labels)),
    Rule("eval.sample_prompts, task: classification|reward",
         "{0} are answered by a model that writes text, and {1} is {v[1]}. Leave {0} out."),
    Rule("data.streaming, task: classification|reward",
         "{0} reads the data during training, and {1}: {v[1]} needs all of it before. Write data.streaming: false."),
)  # fmt: skip
