"""A bucket of a real server for each test, and the environment that boto3 reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ckptsurgeon.cli import app
from tests.remote.proxy import Proxy, proxy
from tests.remote.servers import KEY, SECRET, SERVERS, client

PLAIN = {"NO_COLOR": None, "FORCE_COLOR": None, "CKPTSURGEON_RUN": None, "COLUMNS": "100"}
Look = Callable[..., Result]


@pytest.fixture(scope="session", params=list(SERVERS))
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The address of each server in turn."""
    with SERVERS[request.param](tmp_path_factory.mktemp(request.param)) as address:
        yield address


@pytest.fixture
def store(server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A client of the server, whose bucket is empty. What this process starts finds it by its
    environment, and has a cache of its own."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = client(server)
    pages = made.get_paginator("list_objects_v2").paginate(Bucket="bucket")
    for item in [item for page in pages for item in page.get("Contents", ())]:
        made.delete_object(Bucket="bucket", Key=item["Key"])
    return made


@pytest.fixture
def between(store: Any, server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy that clients take for the server; they try again at once."""
    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda _: None)
    with proxy(server) as made:
        monkeypatch.setenv("AWS_ENDPOINT_URL", made.address)
        yield made


@pytest.fixture
def look() -> Look:
    """`look("status", "-C", run)`: the result, with stdout, stderr and exit_code."""

    def invoke(*words: object) -> Result:
        return CliRunner(env=PLAIN).invoke(app, [str(word) for word in words])

    return invoke
