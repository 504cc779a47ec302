"""A run of 100,000 objects: as many requests for its names as there are pages of 1,000."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.remote.buckets import RUN
from tests.remote.conftest import Look
from tests.remote.proxy import Proxy
from tests.remote.servers import FILER, seaweedfs
from tests.support.tiny_run import make_run

pytestmark = [pytest.mark.remote, pytest.mark.slow]
PAGE = 1_000
STEPS = range(10, 1010, 10)
FILES = 1_000
"""Of each step."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """SeaweedFS alone: moto takes a second for each page."""
    (tmp_path / "server").mkdir()
    with seaweedfs(tmp_path / "server") as address:
        yield address


@pytest.fixture
def filled(store: Any, tmp_path: Path) -> None:
    """Steps of three files that are read, and of others that are not. They are given to what keeps
    the names of SeaweedFS: a signature for each would take minutes."""
    port = int((tmp_path / "server" / FILER).read_text())

    def save(folder: Path) -> None:
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        files |= {f"rng_state_{at}.pth": b"x" * 20 for at in range(FILES - len(files))}
        with closing(HTTPConnection("127.0.0.1", port)) as connection:
            for name, data in files.items():
                connection.request("PUT", f"/buckets/bucket/run/{folder.name}/{name}", data)
                answer = connection.getresponse()
                answer.read()
                assert answer.status == 201, answer.status

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(save, make_run(tmp_path / "run", steps=STEPS).iterdir()))


@pytest.mark.usefixtures("filled")
def test_a_page_of_names_is_asked_for_once(between: Proxy, look: Look) -> None:
    pages = len(STEPS) * FILES // PAGE
    for words, others in (["status"], 8), (["rollback", "--to", "500", "-n"], 16):
        between.clear()
        found = look(*words, "--json", "-C", RUN)
        assert found.exit_code == 0, found.output
        lists = [request for request in between.seen if "list-type=2" in request.path]
        assert pages <= len(lists) <= pages + 1, words
        assert len(between.seen) - len(lists) <= others, between.seen[-others:]
        if words == ["status"]:
            assert len(json.loads(found.stdout)["steps"]) == len(STEPS)
