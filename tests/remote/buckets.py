"""Runs in the bucket of a test: what is there, and a command that is killed there."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckptsurgeon.transaction.home import NOTE
from tests.remote.proxy import Proxy, Request
from tests.support.event_logs import spiked, write_log
from tests.support.tiny_run import make_run

RUN = "s3://bucket/run"
Objects = dict[str, tuple[bytes, str, str]]
GONE = 1 << 30
"""No process has this number."""
LONG = 6 << 20
"""Bytes of a shard that a store copies in parts."""


def long_run(root: Path) -> Path:
    """A run whose latest step has one shard that is long enough to be copied in parts."""
    run = make_run(root, steps=(4, 8))
    with zipfile.ZipFile(run / "checkpoint-8/optimizer.pt", "a") as archive:
        archive.writestr("optimizer/data/0", random.Random(1).randbytes(LONG))
    write_log(run / "tb", spiked(12, 9))
    for path in (run / "tb").iterdir():  # its writer has ended, also for a child of this process
        path.rename(path.with_name(path.name.replace(f".{os.getpid()}.", f".{GONE}.")))
    return run


def fill(store: Any, run: Path, prefix: str = "run") -> None:
    """The files of the run as objects, with something said of each."""
    for path in sorted(run.rglob("*")):
        if path.is_file():
            store.put_object(
                Bucket="bucket", Key=f"{prefix}/{path.relative_to(run)}", Body=path.read_bytes(),
                ContentType="application/x-shard", Metadata={"saved-by": path.suffix.strip(".")},
                CacheControl="no-store",
            )  # fmt: skip


def keys(store: Any, prefix: str = "run/") -> list[str]:
    """Every key below it."""
    pages = store.get_paginator("list_objects_v2").paginate(Bucket="bucket", Prefix=prefix)
    return [item["Key"] for page in pages for item in page.get("Contents", ())]


def objects(store: Any, prefix: str = "run/") -> Objects:
    """Bytes, and what is said beside them, of every object, but of those of the surgeon."""
    found = {}
    for key in keys(store, prefix):
        if "/.ckptsurgeon/" not in key:
            got = store.get_object(Bucket="bucket", Key=key)
            about = f"{got['ContentType']} {got.get('CacheControl')}", str(got["Metadata"])
            found[key[len(prefix) :]] = (got["Body"].read(), *about)
    notes = [name for name in found if name.endswith(NOTE)]
    return {name: each for name, each in found.items() if name not in notes} | {
        f"note {number}": (b"", "", "") for number in range(len(notes))
    }  # it says when it was written


def here(run: Path) -> dict[str, bytes]:
    """The bytes of each file, but of a note, which says when it was written."""
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and ".ckptsurgeon" not in path.parts and not path.name.endswith(NOTE)
    }


def there(store: Any) -> dict[str, bytes]:
    """The bytes of each object, but of a note, which says when it was written."""
    found = objects(store)
    return {name: each[0] for name, each in found.items() if not name.startswith("note ")}


def held(words: list[str], store: Any, look: Callable[..., Any], run: Path) -> None:
    """The run is in the bucket as on the disk: it is there after the command, an undo, a redo, and
    an undo of that."""
    before: Objects = objects(store)
    for each in (words, ["undo"], ["redo"], ["undo"]):
        done = [look(*each, "--yes", "-C", at) for at in (run, RUN)]
        assert [found.exit_code for found in done] == [0, 0], (each, done[1].output, done[0].output)
        assert there(store) == here(run), each
        assert left_over(store) == []
        if each == ["undo"]:
            assert objects(store) == before
        checked = [look("verify", "-C", at).exit_code for at in (run, RUN)]
        assert checked[0] == checked[1] and (not checked[0] or each == ["undo"]), checked


def left_over(store: Any, prefix: str = "run/") -> list[str]:
    """What no surgery leaves: a record of one under way, a lock, staged bytes, open uploads."""
    inside = [key.partition("/.ckptsurgeon/")[2] for key in keys(store, prefix)]
    left = [name for name in inside if name and not name.startswith(("receipts/", "attic/"))]
    uploads = store.list_multipart_uploads(Bucket="bucket").get("Uploads", ())
    return left + [f"upload of {upload['Key']}" for upload in uploads]


def killed_at(
    between: Proxy, number: int, look: Callable[..., Any], words: list[str], *, done: bool
) -> int:
    """The exit code of a command that is killed when it makes this request, which the server gets
    if `done`; below 0 where it was killed, as of a process."""
    pid: list[int] = []

    def kill(request: Request) -> str | None:
        if request.number == number and pid:
            os.kill(pid[0], signal.SIGKILL)
            return None if done else "reset"
        return None

    between.clear()
    between.fault = kill
    process = multiprocessing.get_context("fork").Process(target=_run, args=(look, words))
    process.start()
    pid.append(process.pid or 0)
    process.join()
    between.fault = lambda request: None
    return process.exitcode if process.exitcode is not None else -1


def apart(look: Callable[..., Any], words: list[str]) -> tuple[int, str]:
    """The exit code and the output of a command whose process has ended after it."""
    there, here = multiprocessing.get_context("fork").Pipe()

    def run() -> None:
        found = look(*words)
        here.send((found.exit_code, found.output))
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    found: tuple[int, str] = there.recv()
    process.join()
    there.close()
    here.close()
    return found


def _run(look: Callable[..., Any], words: list[str]) -> None:
    found = look(*words)
    if found.exit_code:
        os.write(2, found.output.encode())
    os._exit(found.exit_code)
