"""Options have the defaults of the recipe's sections."""

from __future__ import annotations

import dataclasses

import pytest

from ligertune.planning import options
from ligertune.recipe import schema

PAIRS = [
    (options.TokenizerOptions, schema.TokenizerSpec),
    (options.ModelOptions, schema.ModelSpec),
    (options.KernelOptions, schema.KernelsSpec),
    (options.MethodOptions, schema.MethodSpec),
    (options.DatasetOptions, schema.DatasetSpec),
    (options.DataOptions, schema.DataSpec),
    (options.VisionOptions, schema.VisionSpec),
    (options.MedusaOptions, schema.MedusaSpec),
    (options.ExecutionOptions, schema.TrainSpec),
    (options.ParallelOptions, schema.ParallelSpec),
    (options.CheckpointOptions, schema.CheckpointSpec),
    (options.EvaluationOptions, schema.EvalSpec),
    (options.LoggingOptions, schema.LoggingSpec),
    (options.MeasurementOptions, schema.ReportSpec),
]


@pytest.mark.parametrize(("values", "section"), PAIRS, ids=lambda cls: cls.__name__)
def test_options_have_the_defaults_of_the_recipe(values, section):
    for field in dataclasses.fields(values):
        key = section.model_fields[field.name]
        if key.is_required() or field.name == "tokenizer":
            continue
        default = field.default_factory() if field.default is dataclasses.MISSING else field.default
        assert default == key.default, field.name
