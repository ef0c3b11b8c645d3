"""A signal during a run is recorded before the run goes on."""

import hashlib
import os
import signal
import threading
import time

from ligertune.launcher.signals import StopRequest


class SlowRequest(StopRequest):
    """One that takes time to answer, as a thread does that waits for a core."""

    def _answer(self, number: int) -> None:
        time.sleep(0.5)
        super()._answer(number)


def test_it_is_recorded_when_the_handler_has_run_even_if_the_other_thread_answers():
    with SlowRequest() as stop:
        stop.hold()
        content = bytes(1 << 26)
        arrives = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGTERM))
        arrives.start()
        while arrives.is_alive():  # no bytecode runs during a hash (0.1 s), so the other thread reads the signal
            hashlib.sha256(content)
        assert stop.received == "SIGTERM"
