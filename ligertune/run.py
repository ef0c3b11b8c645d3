"""A run on one page: job -> session with the loaded model -> training loop -> model on disk -> report."""

from __future__ import annotations

import time

from ligertune.progress import Display, LogLine, Phases
from ligertune.report import Report, make_report, write_run_report
from ligertune.training.build import Change
from ligertune.training.checkpoint.final_model import save_final_model
from ligertune.training.loop import fit
from ligertune.training.metrics.train_result import TrainResult
from ligertune.training.session import Session, open_session, second_try
from ligertune.training.setup import Custom, Job


def run(
    job: Job,
    show: LogLine,
    *,
    change: Change | None = None,
    phases: Phases | None = None,
    display: Display | None = None,
    custom: Custom | None = None,
) -> Report:
    """Train as planned, save the model, and report. All ranks call it.

    show: receives each logged line. change: applied to the patched model, for comparisons with other kernels. phases:
    measures the time to the first step. display: shows steps and evaluations while they run. custom: what a Python user
    brings. If the first step runs out of memory, the run begins again, once, with other settings than those that the
    plan chose.
    """
    phases = phases or Phases()
    with open_session(job, show, change=change, phases=phases, display=display, custom=custom) as session:
        with second_try(job, session) as second:
            fitted = fit(session.training, stop=session.stop, phases=phases)
        if second.job is None:
            report = write_results(session, fitted)
            # last: an error of a callback does not cost the model
            plan = session.training.plan
            session.training.callbacks.call("on_train_end", report=report, plan=plan, model=fitted.model)
            return report
    del session  # the second try needs the memory of the first one
    show({"step": 0, "note": second.job.plan.notes[-1]})
    return run(second.job, show, change=change, phases=phases, display=display, custom=custom)


def write_results(session: Session, fitted: TrainResult) -> Report:
    """Write the trained model, report.json and report.html. All ranks call it."""
    training = session.training
    plan = training.plan
    data = training.job.data
    training.display.begins("writing the model")
    saves = plan.checkpoint.save_model and not fitted.stopped_by
    model_path, measured = save_final_model(training.job, training.accelerator, fitted) if saves else (None, None)
    report = make_report(
        plan,
        fitted,
        model_path=model_path,
        measured=measured,
        started=session.started,
        seconds=time.perf_counter() - session.began,
        seconds_to_first_step=session.phases.seconds,
        notes=data.stream_notes,
    )
    if training.accelerator.is_main_process:
        write_run_report(plan, report)
    return report
