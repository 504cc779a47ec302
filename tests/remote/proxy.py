"""A proxy before a server: it counts requests and bytes, and is as bad as it is told."""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from email.utils import formatdate, parsedate_to_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

Fault = Callable[["Request"], str | None]
"""What becomes of a request: None, or one of OF_WRITES."""
FAULTS = ("500", "503", "reset", "stall", "cut")
OF_WRITES = (*FAULTS, "lost", "denied")
"""Also: the server does what it was asked, and its answer is lost; it may not do it."""
DENIED = b"<Error><Code>AccessDenied</Code><Message>No.</Message></Error>"
HOP = {"connection", "keep-alive", "transfer-encoding"}
STALL_S = 3.0
"""Longer than the tests let a client wait."""


LISTED = re.compile(rb"(?<=<LastModified>)[^<]+")


def _moment(header: str, ahead_s: int) -> float:
    return parsedate_to_datetime(header).timestamp() + ahead_s


def _listed(moment: bytes, ahead_s: int) -> bytes:
    then = datetime.fromisoformat(moment.decode()) + timedelta(seconds=ahead_s)
    return then.isoformat().replace("+00:00", "Z").encode()


@dataclass(frozen=True)
class Request:
    """One that reached the proxy, and its number from 0 on."""

    number: int
    method: str
    path: str
    source: str = ""
    """What the server shall copy, as bucket and key."""


@dataclass
class Proxy:
    """`seen` are the requests, `sent` the bytes that the clients got, `received` those that they
    gave; `fault` decides on each."""

    address: str
    latency_s: float = 0.0
    ahead_s: int = 0
    """By which the server's clock seems to be ahead, in whatever it says of a time."""
    fault: Fault = lambda request: None
    seen: list[Request] = field(default_factory=list)
    sent: int = 0
    received: int = 0
    now: int = 0
    most: int = 0
    """Requests under way, and how many there were at once."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def clear(self) -> None:
        """Count from 0 again."""
        with self.lock:
            self.seen, self.sent, self.received, self.most = [], 0, 0, 0


@contextmanager
def proxy(server: str, tls: ssl.SSLContext | None = None) -> Iterator[Proxy]:
    """A proxy before the server at this address; clients speak TLS with it where it has some."""
    behind = urlsplit(server)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            with made.lock:
                source = unquote(self.headers.get("x-amz-copy-source", "")).lstrip("/")
                request = Request(len(made.seen), self.command, self.path, source)
                made.seen.append(request)
                made.received += int(self.headers.get("Content-Length", 0))
                made.now += 1
                made.most = max(made.most, made.now)
            try:
                self.decide(request)
            finally:
                with made.lock:
                    made.now -= 1

        def decide(self, request: Request) -> None:
            body = self.body()
            time.sleep(made.latency_s)
            fault = made.fault(request)
            if fault in ("500", "503"):
                self.send_response(int(fault))
                self.send_header("Content-Length", "0")
                self.end_headers()
            elif fault == "denied":
                self.send_response(403)
                self.send_header("Content-Length", str(len(DENIED)))
                self.end_headers()
                self.wfile.write(DENIED)
            elif fault == "reset":
                self.reset()
            elif fault == "stall":
                time.sleep(STALL_S)
                self.close_connection = True
            else:
                self.pass_on(body, half=fault == "cut", lost=fault == "lost")

        def body(self) -> bytes:
            """Whole. A client that speaks TLS sends it in chunks, and its checksum after it."""
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            found = b""
            while size := int(self.rfile.readline(), 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return found

        def reset(self) -> None:
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.close_connection = True
            self.connection.close()

        def pass_on(self, body: bytes, half: bool, lost: bool) -> None:
            behind_it = http.client.HTTPConnection(behind.hostname or "", behind.port)
            with closing(behind_it) as connection:  # a killed client must leave none open
                connection.putrequest(
                    self.command, self.path, skip_host=True, skip_accept_encoding=True
                )
                for name, value in self.headers.items():
                    if name.lower() not in HOP:
                        connection.putheader(name, value)
                if body and "Content-Length" not in self.headers:
                    connection.putheader("Content-Length", str(len(body)))
                connection.endheaders(body)
                answer = connection.getresponse()
                data = answer.read()
                if lost:
                    self.reset()
                    return
                self.send_response_only(answer.status, answer.reason)
                for name, value in answer.getheaders():
                    if name.lower() in ("date", "last-modified"):
                        value = formatdate(_moment(value, made.ahead_s), usegmt=True)
                    if name.lower() not in (*HOP, "content-length"):
                        self.send_header(name, value)
                if made.ahead_s:
                    data = LISTED.sub(lambda found: _listed(found[0], made.ahead_s), data)
                length = answer.getheader("Content-Length") if self.command == "HEAD" else None
                self.send_header("Content-Length", length or str(len(data)))
                self.end_headers()
                data = data[: len(data) // 2] if half and len(data) > 1 else data
                self.wfile.write(data)
                with made.lock:
                    made.sent += len(data)
                self.close_connection = self.close_connection or half

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

        def log_message(self, *_: Any) -> None:
            """Nothing is printed."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            """A client that went away is none."""

    with Server(("127.0.0.1", 0), Handler) as listening:
        if tls is not None:  # a handshake that fails is no matter of who listens
            listening.socket = tls.wrap_socket(
                listening.socket, server_side=True, do_handshake_on_connect=False
            )
        scheme = "https" if tls else "http"
        made = Proxy(f"{scheme}://127.0.0.1:{listening.server_address[1]}")
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        try:
            yield made
        finally:
            listening.shutdown()
            thread.join()
