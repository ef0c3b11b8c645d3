"""An HTTP server that answers as the Hugging Face hub does: it serves one data set, and takes uploads of models."""

import base64
import contextlib
import json
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REVISION = "0123456789abcdef0123456789abcdef01234567"
ETAG = "a" * 40


class Hub(ThreadingHTTPServer):
    """Serve `files` (path -> content) as the data set `name`, and count the bytes of content sent.

    Uploaded files are in `uploaded`, the requests that created repositories in `created`, and the revisions of the data
    set that were asked for in `revisions`.
    """

    def __init__(self, name: str, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.name, self.files, self.bytes_sent = name, files, 0
        self.created: list[dict] = []
        self.revisions: set[str] = set()
        self.uploaded: dict[str, bytes] = {}

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextlib.contextmanager
def serving(name: str, files: dict[str, bytes]) -> Iterator[Hub]:
    with Hub(name, files) as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        api, resolved = f"/api/datasets/{self.server.name}", f"/datasets/{self.server.name}/resolve/"
        if path == api or path.startswith(f"{api}/revision/"):
            self.server.revisions.add(path.removeprefix(api).removeprefix("/revision/"))
            siblings = [{"rfilename": file} for file in self.server.files]
            self._send(json.dumps({"id": self.server.name, "sha": REVISION, "siblings": siblings}).encode())
        elif path.startswith(f"{api}/tree/{REVISION}"):
            folder = path.removeprefix(f"{api}/tree/{REVISION}").strip("/")
            self._send(json.dumps(self._entries(folder)).encode())
        elif path.startswith(resolved) and path.removeprefix(resolved).partition("/")[2] in self.server.files:
            self._send_file(self.server.files[path.removeprefix(resolved).partition("/")[2]])
        else:
            self._send(b"", code=404, headers={"x-error-code": "EntryNotFound"})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Take a new repository, and commits to it whose files are in the request, as small files are on the hub."""
        body = self.rfile.read(int(self.headers["content-length"]))
        path = urllib.parse.urlsplit(self.path).path
        answer: dict[str, object] = {}
        if path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            answer = {"url": f"{self.server.endpoint}/{self.server.name}", "name": self.server.name}
        elif "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            answer = {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
        elif "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.uploaded[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            address = f"{self.server.endpoint}/{self.server.name}/commit/{REVISION}"
            answer = {"commitUrl": address, "commitOid": REVISION, "success": True}
        self._send(json.dumps(answer).encode())

    def _entries(self, folder: str) -> list[dict[str, object]]:
        files = [
            {"type": "file", "path": path, "size": len(content), "oid": ETAG}
            for path, content in self.server.files.items()
            if path.rpartition("/")[0] == folder
        ]
        folders = {path.partition("/")[0] for path in self.server.files if "/" in path} if not folder else set()
        return files + [{"type": "directory", "path": path, "oid": ETAG} for path in sorted(folders)]

    def _send_file(self, content: bytes) -> None:
        headers = {"x-repo-commit": REVISION, "etag": f'"{ETAG}"', "accept-ranges": "bytes"}
        requested = self.headers.get("range")
        if requested is None:
            self._send(content, headers=headers)
            return
        first, _, last = requested.removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last) + 1 if last else None]
        headers["content-range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
        self._send(part, code=206, headers=headers)

    def _send(self, body: bytes, *, code: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {"content-length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(ConnectionError):  # a client may close the connection early
                self.wfile.write(body)
            if self.path.startswith("/datasets/"):
                self.server.bytes_sent += len(body)
