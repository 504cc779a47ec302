"""Whatever a server does, a look ends with the right answer or with three lines, and no secret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon.remote import store as remote_store
from tests.remote.conftest import Look
from tests.remote.proxy import FAULTS, Proxy, Request, proxy
from tests.remote.servers import SECRET, upload
from tests.support.event_logs import spiked, write_log
from tests.support.tiny_run import make_run

pytestmark = pytest.mark.remote
RUN = "s3://bucket/runs/one"


@pytest.fixture
def between(store: Any, server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy that clients take for the server, who wait for little."""
    monkeypatch.setattr(remote_store, "READ_S", 1)
    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda _: None)
    with proxy(server) as made:
        monkeypatch.setenv("AWS_ENDPOINT_URL", made.address)
        yield made


@pytest.fixture
def run(store: Any, tmp_path: Path) -> Path:
    root = make_run(tmp_path / "runs" / "one", steps=(4, 8))
    write_log(root / "tb", spiked(40, 30))
    upload(store, root, "runs/one")
    return root


def three_lines(text: str) -> list[str]:
    lines = text.strip().splitlines()
    assert len(lines) >= 3, text
    assert "the run is exactly as it was" in text and "Traceback" not in text
    return lines


@pytest.mark.parametrize("fault", FAULTS)
def test_each_request_fails_once(fault: str, run: Path, between: Proxy, look: Look) -> None:
    """It is made again, and the answer is the same."""
    right = look("verify", "--level", "3", "--json", "-C", run)
    look("verify", "--level", "3", "-C", RUN)
    requests = len(between.seen)
    assert requests >= 4
    for number in range(requests):
        between.clear()
        between.fault = lambda request, number=number: fault if request.number == number else None
        forget()
        found = look("verify", "--level", "3", "--json", "-C", RUN)
        assert found.stdout == right.stdout.replace(str(run), RUN), (number, found.output)
        assert found.exit_code == right.exit_code


@pytest.mark.parametrize("fault", FAULTS)
def test_each_request_fails_for_good(fault: str, run: Path, between: Proxy, look: Look) -> None:
    """No answer at all: what was not read is no finding about the run."""
    look("status", "--json", "-C", RUN)
    requests = len(between.seen)
    assert requests >= 5
    for number in range(requests):
        between.clear()
        between.fault = lambda request, number=number: fault if request.number >= number else None
        forget()
        found = look("status", "--json", "-C", RUN)
        assert found.exit_code == 1, (number, found.output)
        assert found.stdout == ""
        error = json.loads(found.stderr)
        assert "s3://bucket/runs/one" in error["error"] and error["next"]


def forget() -> None:
    """What earlier commands have fetched."""
    import shutil

    shutil.rmtree(Path(os.environ["XDG_CACHE_HOME"], "ckptsurgeon"), ignore_errors=True)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "canary-5d41402abc"}, ""),
        ({"AWS_ACCESS_KEY_ID": "canary-5d41402abc"}, ""),
        ({"AWS_ENDPOINT_URL": "http://user:canary-5d41402abc@127.0.0.1:9"}, "does not answer"),
        ({"AWS_ENDPOINT_URL": "https://127.0.0.1:9"}, "does not answer"),
        ({"AWS_SESSION_TOKEN": "canary-5d41402abc"}, ""),
        ({"AWS_PROFILE": "nobody"}, "boto3 takes none of these settings"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "finds no credentials"),
    ],
)
@pytest.mark.parametrize("words", [["status"], ["status", "--json"], ["doctor", "--json"]])
def test_no_secret_is_printed(
    changed: dict[str, str], said: str, words: list[str], run: Path, look: Look,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, value in changed.items():
        monkeypatch.setenv(name, value)
        if not value:
            monkeypatch.delenv(name)
    found = look(*words, "-C", RUN)
    assert found.exit_code in (0, 1, 2, 4) and said in found.stderr
    if said:
        assert found.exit_code and not found.stdout
    for secret in (SECRET, "canary"):
        assert secret not in found.output
    for path in Path(os.environ["XDG_CACHE_HOME"]).rglob("*"):
        assert not path.is_file() or b"canary" not in path.read_bytes()


def test_what_is_not_there(store: Any, look: Look) -> None:
    for address, said in {
        "s3://bucket/nowhere": "no object is below s3://bucket/nowhere/",
        "s3://no-such-bucket-here/run": "says NoSuchBucket (404)",
        "s3://A/run": "s3://A",
        "s3://": "names no bucket",
        "gs://bucket/run": "gs:// is not read, only s3://",
    }.items():
        found = look("status", "-C", address)
        assert found.exit_code in (1, 2) and said in found.stderr, found.stderr
        three_lines(found.stderr)


def test_a_run_that_is_further_up_or_down(run: Path, store: Any, look: Look) -> None:
    above = look("status", "-C", "s3://bucket/runs")
    assert above.exit_code == 2 and "-C s3://bucket/runs/one" in above.stderr
    below = look("status", "-C", f"{RUN}/tb")
    assert below.exit_code == 2 and "no training run in s3://bucket/runs/one/tb" in below.stderr


def test_an_object_that_changes_meanwhile(
    run: Path, store: Any, between: Proxy, look: Look
) -> None:
    """Between the listing and the read: nothing is said of the half that is old."""

    def overwrite(request: Request) -> str | None:
        if request.method == "GET" and "optimizer.pt" in request.path:
            store.put_object(Bucket="bucket", Key="runs/one/checkpoint-8/optimizer.pt", Body=b"new")
        return None

    between.fault = overwrite
    found = look("verify", "-C", RUN)
    assert found.exit_code == 1 and not found.stdout
    assert "optimizer.pt changed while it was read" in three_lines(found.stderr)[0]


def test_a_second_command_fetches_nothing_anew(run: Path, between: Proxy, look: Look) -> None:
    first = look("verify", "--level", "3", "-C", RUN)
    assert len(between.seen) > 2
    between.clear()
    second = look("verify", "--level", "3", "-C", RUN)
    assert second.output == first.output
    assert ["list-type=2" in request.path for request in between.seen] == [True]


def test_what_was_overwritten_since_is_fetched_anew(run: Path, store: Any, look: Look) -> None:
    """Also by an object of the same size, and where the old one comes back."""
    key, file = "runs/one/checkpoint-8/trainer_state.json", run / "checkpoint-8/trainer_state.json"
    old = file.read_bytes()
    other = old.replace(b"8", b"9")
    for content in (old, other, old, other):
        store.put_object(Bucket="bucket", Key=key, Body=content)
        file.write_bytes(content)
        here = look("verify", "8", "--json", "-C", run).stdout
        assert look("verify", "8", "--json", "-C", RUN).stdout == here.replace(str(run), RUN)
    store.delete_object(Bucket="bucket", Key=key)
    file.unlink()
    here = look("verify", "8", "--json", "-C", run).stdout
    assert look("verify", "8", "--json", "-C", RUN).stdout == here.replace(str(run), RUN)


KILLED = """
import os, sys
from ckptsurgeon.disk import cache
from ckptsurgeon.__main__ import main
calls, last = 0, int(sys.argv[1])
def counted(function):
    def call(*arguments):
        global calls
        calls += 1
        if calls == last:
            os.kill(os.getpid(), 9)
        return function(*arguments)
    return call
for name in ("make_folder", "make_hollow", "fill", "make_durable", "replace", "remove"):
    setattr(cache, name, counted(getattr(cache, name)))
sys.argv = ["ckptsurgeon", *sys.argv[2:]]
main()
"""


def test_killed_at_each_write_to_the_mirror(run: Path, store: Any, look: Look) -> None:
    """The next command reads what is there. Objects change between the two, and change back."""
    key, file = "runs/one/checkpoint-8/optimizer.pt", run / "checkpoint-8/optimizer.pt"
    contents = [file.read_bytes(), (run / "checkpoint-4/optimizer.pt").read_bytes()]
    right = []
    for content in contents:
        file.write_bytes(content)
        right.append(look("show", "8", "--json", "-C", run).stdout)
    for at in range(1, 100, 2):
        words = [sys.executable, "-c", KILLED, str(at), "show", "8", "--json", "-C", RUN]
        store.put_object(Bucket="bucket", Key=key, Body=contents[at % 2])
        ended = subprocess.run(words, capture_output=True, check=False)
        assert ended.returncode in (0, -9), ended.stderr
        for which in (at % 2, 1 - at % 2):
            store.put_object(Bucket="bucket", Key=key, Body=contents[which])
            found = json.loads(look("show", "8", "--json", "-C", RUN).stdout)
            wanted = json.loads(right[which].replace(str(run), RUN))
            for document in (found, wanted):
                document.pop("saved_at", None)
            assert found == wanted
        if ended.returncode == 0:
            return
    raise AssertionError("it never came to its end")
