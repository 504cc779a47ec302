"""A server on this host that answers `wandb sync`, and keeps what is uploaded."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BUCKET = {
    "id": "bucket", "name": "run", "displayName": "run", "description": None, "config": None,
    "sweepName": None, "historyLineCount": 0,
    "project": {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}},
}  # fmt: skip

NEW = {
    "model": {"bucket": None},
    "createRunFiles": {"runID": "run", "uploadHeaders": [], "files": []},
}


@dataclass
class Uploaded:
    """What runs got, by id: rows of the history, in order, and their last summary."""

    address: str
    history: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    summary: dict[str, dict[str, Any]] = field(default_factory=dict)
    system: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def take(self, run: str, files: dict[str, Any]) -> None:
        for name, kept in (("history", self.history), ("events", self.system)):
            lines = files.get(f"wandb-{name}.jsonl", {}).get("content", [])
            kept.setdefault(run, []).extend(map(json.loads, lines))
        for line in files.get("wandb-summary.json", {}).get("content", []):
            self.summary[run] = json.loads(line)


@contextmanager
def server() -> Iterator[Uploaded]:
    """It runs meanwhile."""

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Nothing."""

        def do_GET(self) -> None:
            self._say({})

        def do_PUT(self) -> None:
            self._body()
            self._say({})

        def do_POST(self) -> None:
            body = self._body()
            if "/file_stream" in self.path:
                run = self.path.split("/")[-2]
                uploaded.take(run, json.loads(body).get("files") or {})
                self._say({"exitcode": None, "limits": {}})
            elif self.path.endswith("/graphql"):
                asked = json.loads(body)
                bucket = {**BUCKET, "name": asked.get("variables", {}).get("name")}
                made = {"upsertBucket": {"bucket": bucket, "inserted": True}}
                self._say({"data": made if "upsertBucket" in asked["query"] else NEW})
            else:
                self._say({})

        def _body(self) -> bytes:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            return gzip.decompress(data) if self.headers.get("Content-Encoding") else data

        def _say(self, answer: dict[str, Any]) -> None:
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as here:
        uploaded = Uploaded(f"http://127.0.0.1:{here.server_port}")
        thread = threading.Thread(target=here.serve_forever)
        thread.start()
        try:
            yield uploaded
        finally:
            here.shutdown()
            thread.join()
