"""What is said before the first step, and when."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time

from ligertune.phases import Phases


def test_a_phase_that_lasts_is_named_again_until_the_next_begins():
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
    assert len(said) == heard, "it goes on after the last phase"
    assert list(phases.seconds) == ["planning", "loading the model"]
    assert phases.seconds["planning"] >= 0.5


def test_another_process_goes_on_where_one_handed_over():
    phases = Phases(first="planning", begun=time.perf_counter() - 7)
    phases.end()
    code = (
        "import sys; from ligertune.phases import taken_over\n"
        "p = taken_over(sys.argv[1], None, first='starting'); p.end(); print(p.seconds)"
    )
    command = [sys.executable, "-c", code, phases.handed_on()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    time.sleep(0.3)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    seconds = ast.literal_eval(done.stdout)
    assert list(seconds) == ["planning", "starting"]
    assert seconds["planning"] >= 7 and seconds["starting"] >= 0.3
