"""A stand-in for Hugging Face that answers ``huggingface_hub`` on loopback from folders."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c0ffee" + "0" * 34


class FakeHub(ThreadingHTTPServer):
    """Models by id, each a folder."""

    daemon_threads = True

    def __init__(self, models: Mapping[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.models = models
        self.asked_for: list[str] = []
        """Names of files whose content was asked for."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def fake_hub(models: Mapping[str, Path]) -> Iterator[FakeHub]:
    with FakeHub(models) as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class _Answers(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        about = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/\w+", path)
        content = re.fullmatch(rf"/([^/]+/[^/]+)/resolve/{COMMIT}/(.+)", path)
        match = about or content
        folder = self.server.models.get(match[1]) if match else None
        if match is None or folder is None:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif about and about[2] == "revision":
            self._send(200, json.dumps({"id": match[1], "sha": COMMIT, "siblings": []}).encode())
        elif about:
            files = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": "0" * 40}
                for file in sorted(folder.iterdir())
            ]
            self._send(200, json.dumps(files).encode())
        else:
            body = (folder / match[2]).read_bytes()
            etag = hashlib.sha1(body).hexdigest()
            if self.command == "GET":
                self.server.asked_for.append(match[2])
            self._send(200, body, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass
