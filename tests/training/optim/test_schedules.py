"""Learning-rate schedules: those of transformers by step, and those that follow evaluation losses."""

import pytest
import torch
from pydantic import ValidationError
from support.quickstart_runs import plan_run
from transformers import get_scheduler

from ligertune.errors import UserError
from ligertune.planning.optimization import Cadence, TrainSchedule, interval
from ligertune.recipe.train_sections import FOLLOW_EVALUATIONS, SCHEDULES, TrainSpec
from ligertune.training.optim.schedules import LearningRates, learning_rate

RATE, TOTAL, WARMUP = 3e-4, 60, 6


def schedule(kind: str, warmup: int = WARMUP, **kwargs: object) -> TrainSchedule:
    return TrainSchedule(TOTAL, warmup, RATE, kind, 0.1, tuple(kwargs.items()))


def rates_of_transformers(kind: str, warmup: int, kwargs: dict) -> list[float]:
    """Step transformers' own scheduler, as its Trainer does."""
    optimizer = torch.optim.SGD([torch.zeros(())], lr=RATE)
    scheduler, found = get_scheduler(kind, optimizer, warmup, TOTAL, kwargs), []
    for _ in range(TOTAL):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [
        ("cosine", {"num_cycles": 1.5}),
        ("linear", {}),
        ("constant_with_warmup", {}),
        ("cosine_with_restarts", {"num_cycles": 3}),
        ("polynomial", {"power": 2.0, "lr_end": 1e-5}),
        ("inverse_sqrt", {}),
        ("cosine_with_min_lr", {"min_lr": 1e-5}),
        ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.2, "warmup_lr_rate": 0.05}),
        ("warmup_stable_decay", {"num_decay_steps": 20, "decay_type": "1-sqrt", "warmup_type": "cosine"}),
    ],
)
def test_the_rates_are_those_of_transformers_and_the_warm_up_is_a_step_early(kind, kwargs):
    expected = rates_of_transformers(kind, WARMUP, kwargs)
    found = [learning_rate(schedule(kind, **kwargs), step) for step in range(TOTAL)]
    assert found[WARMUP:] == pytest.approx(expected[WARMUP:])
    assert found[:WARMUP] == pytest.approx(expected[1 : WARMUP + 1])
    assert found[0] > 0


def test_the_final_rate_of_cosine_with_min_lr_is_the_recipes_share_unless_an_option_gives_it():
    ends = [
        learning_rate(schedule("cosine_with_min_lr", **kwargs), TOTAL) / RATE
        for kwargs in ({"num_cycles": 0.5}, {"min_lr_rate": 0.3}, {})
    ]
    assert ends == pytest.approx([0.1, 0.3, 0.1])


def test_a_plateau_lowers_the_rate_and_a_resume_repeats_it():
    losses = [2.0, 1.5, 1.6, 1.7, 1.4, 1.5, 1.5]
    rates, found = LearningRates(schedule("reduce_lr_on_plateau", 0, factor=0.5, patience=1)), []
    for loss in losses:
        rates.observe(loss)
        found.append(rates.at(3))
    assert found == pytest.approx([RATE] * 3 + [RATE / 2] * 3 + [RATE / 4])
    again = LearningRates(schedule("reduce_lr_on_plateau", 0, factor=0.5, patience=1), losses[:4])
    assert again.at(9) == pytest.approx(RATE / 2)


def test_evaluations_change_no_other_schedule():
    assert LearningRates(schedule("linear"), [1.0, 9.0, 9.0]).at(33) == learning_rate(schedule("linear"), 33)


def test_every_schedule_of_a_recipe_is_one_of_transformers():
    for kind in SCHEDULES:
        kwargs = {"num_decay_steps": 5} if kind == "warmup_stable_decay" else {}
        assert LearningRates(schedule(kind, **kwargs)).at(WARMUP) == pytest.approx(RATE, rel=1e-3)


@pytest.mark.parametrize("total", [1, TOTAL])
@pytest.mark.parametrize("kind", [kind for kind in SCHEDULES if kind not in FOLLOW_EVALUATIONS])
def test_a_run_of_warm_up_steps_alone_ends_at_the_peak_rate(kind, total):
    kwargs = (("num_decay_steps", 0),) if kind == "warmup_stable_decay" else ()
    run = TrainSchedule(total, total, RATE, kind, 0.1, kwargs)
    rates = [learning_rate(run, step) for step in range(total)]
    assert rates[-1] == RATE
    assert rates == sorted(rates) and rates[0] > 0


@pytest.mark.parametrize("kind", SCHEDULES)
def test_options_of_a_schedule_that_a_recipe_accepts_give_rates(kind):
    """Each number at the ends of what a recipe accepts."""
    needed = {"num_decay_steps": 5} if kind == "warmup_stable_decay" else {}
    tried = 0
    for name in (name for name, allowed in SCHEDULES[kind].items() if int in allowed):
        for value in (0, 1, 10**9, 10**400, 1e-9, 0.5, 1e9, 1e300):
            kwargs = {**needed, name: value, **({"smooth": True} if name == "window_size" else {})}
            try:
                TrainSpec(lr_scheduler_type=kind, lr_scheduler_kwargs=kwargs, learning_rate=RATE)
            except ValidationError:
                continue
            warmup = 0 if kind in FOLLOW_EVALUATIONS else WARMUP
            rates = LearningRates(TrainSchedule(TOTAL, warmup, RATE, kind, 0.1, tuple(kwargs.items())))
            found = []
            for step in range(TOTAL):
                rates.observe(1.0 / (step + 1))
                found.append(rates.at(step))
            assert all(0 <= rate <= 1 for rate in found), (name, value)
            tried += 1
    assert tried or not SCHEDULES[kind]


def test_intervals_below_one_are_shares_of_all_steps():
    assert [interval(steps, 300) for steps in (7, 1 / 12, 0.0001, 0.999)] == [7, 25, 1, 300]
    assert interval(0.1, 30) == interval(1 / 3 / 10 * 3, 30) == 3  # not 4, although the product is a little more


def test_the_plan_resolves_shares_and_a_decay_longer_than_the_run(tmp_path):
    settings = {"train.max_steps": 40, "checkpoint.save_strategy": "steps", "checkpoint.save_steps": 0.25,
                "eval.eval_steps": 0.1,
                "eval.eval_strategy": "steps", "checkpoint.save_total_limit": "null"}  # fmt: skip
    plan = plan_run(tmp_path, **settings).plan
    assert (plan.save, plan.evaluate) == (Cadence("steps", 10), Cadence("steps", 4))
    assert plan.times(plan.save) == 4
    stable = {"train.lr_scheduler_type": "warmup_stable_decay", "train.lr_scheduler_kwargs": {"num_decay_steps": 41}}
    with pytest.raises(UserError, match="num_decay_steps is 41, and the run has 40 steps, 0 of them warm-up"):
        plan_run(tmp_path, **settings, **stable)
