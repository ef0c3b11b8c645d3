"""Messages of the start-up phases, and their durations."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time

from ligertune.progress import Phases


def test_a_long_phase_is_reported_until_the_next_begins():
    said = []
    with Phases(said.append, first="planning", every=0.2) as phases:
        time.sleep(0.5)
        phases.begin("loading the model")
        time.sleep(0.3)
    heard, second = len(said), said.index("loading the model ...")
    assert second >= 1 and heard >= second + 2, said
    assert set(said[:second]) <= {f"planning ... {n} s" for n in range(4)}
    assert set(said[second + 1 :]) <= {f"loading the model ... {n} s" for n in range(4)}
    time.sleep(0.5)
    assert len(said) == heard, "messages continue after the last phase"
    assert list(phases.seconds) == ["planning", "loading the model"]
    assert phases.seconds["planning"] >= 0.5


def test_another_process_continues_the_phases():
    said, now = [], time.perf_counter()
    with Phases(said.append, first="planning", begun=now - 7, every=0.1) as phases:
        phases.begin("starting")
        passed = time.perf_counter() - now
        time.sleep(0.3)
        handed_on = phases.handed_on()
        heard = len(said)
        time.sleep(0.3)
        assert len(said) == heard, "both processes print messages"
    code = (
        "import sys; from ligertune.progress import taken_over\n"
        "p = taken_over(sys.argv[1], None); p.begin('loading'); p.end(); print(p.seconds)"
    )
    command = [sys.executable, "-c", code, handed_on]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    seconds = ast.literal_eval(done.stdout)
    assert list(seconds) == ["planning", "starting", "loading"]
    assert 7 <= seconds["planning"] <= 7 + passed + 1e-3 and seconds["starting"] >= 0.6
