"""`ligertune report --watch`: a server on the loopback address that makes the page of runs anew for each request."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from ligertune.errors import UserError
from ligertune.report.compare_runs import read_runs, runs_page

ADDRESS = "127.0.0.1"
_NAMES = ("127.0.0.1", "localhost")  # of this machine, in a Host header
RUNNING = 5  # seconds between loads while a run trains
IDLE = 30  # of runs that may be resumed


class LivePageServer(ThreadingHTTPServer):
    """Serves the page of runs at `/`, to programs of this machine only."""

    daemon_threads = True

    def __init__(self, port: int, folders: Sequence[Path]) -> None:
        self.folders = tuple(folders)
        super().__init__((ADDRESS, port), _PageHandler)

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_address[1]}/"

    def page(self) -> tuple[str, int]:
        """Return the page, and the seconds until a browser loads it again. Raises UserError."""
        runs = read_runs(self.folders)
        seconds = RUNNING if any(run.is_running for run in runs) else IDLE
        return runs_page(runs, refresh=seconds), seconds


def listen_for_page(port: int, folders: Sequence[Path]) -> LivePageServer:
    """Return a server that listens on a port; 0: a free one. Raises UserError if the port is not to be had."""
    try:
        return LivePageServer(port, folders)
    except OSError as problem:
        reason = "is in use" if problem.errno == errno.EADDRINUSE else f"cannot be used ({problem.strerror})"
        raise UserError(f"--port: {port} {reason}.", hint="Name another, or 0 for a free one.") from problem


class _PageHandler(BaseHTTPRequestHandler):
    server: LivePageServer

    def do_GET(self) -> None:
        # a page of the internet must not read the runs under a name that it resolves to this machine
        if self.headers.get("Host", "").rsplit(":", 1)[0] not in _NAMES:
            return self._answer(HTTPStatus.FORBIDDEN, "The Host header must name this machine.")
        if self.path.partition("?")[0] != "/":
            return self._answer(HTTPStatus.NOT_FOUND, "There is one page: /")
        try:
            page, seconds = self.server.page()
        except UserError as problem:
            return self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, str(problem), seconds=RUNNING)
        return self._answer(HTTPStatus.OK, page, kind="text/html", seconds=seconds)

    def _answer(self, status: HTTPStatus, text: str, *, kind: str = "text/plain", seconds: int | None = None) -> None:
        content = text.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        if seconds is not None:
            self.send_header("Refresh", str(seconds))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        """Print nothing for a request."""
