"""Runs beside others in a bucket: logs under another prefix, thousands of objects, two readers."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bench import layout
from ckptsurgeon import surgery
from ckptsurgeon.cli.commands import LOOKS_IN_BUCKETS
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.remote.store import CONNECTIONS
from ckptsurgeon.run.run import Run
from tests.remote.conftest import Look
from tests.remote.proxy import proxy
from tests.remote.servers import take_times, upload
from tests.support.event_logs import spiked, write_log
from tests.support.launch import REPO
from tests.support.tiny_run import make_run

pytestmark = pytest.mark.remote
SHARDS = 64


def test_event_files_under_another_prefix(store: Any, look: Look, tmp_path: Path) -> None:
    """Where the settings name it, as on a disk."""
    run = make_run(tmp_path / "runs/one", steps=(4, 8))
    (run / "ckptsurgeon.yaml").write_text("tensorboard: ../../tb/one\n")
    write_log(tmp_path / "tb/one", spiked(40, 30))
    write_log(tmp_path / "tb/two", spiked(40, 30))
    upload(store, run, "runs/one")
    upload(store, tmp_path / "tb", "tb")
    for words in (["status"], ["advise"], ["doctor"]):
        here = look(*words, "--json", "-C", run)
        there = look(*words, "--json", "-C", "s3://bucket/runs/one")
        assert there.stdout == here.stdout.replace(str(tmp_path), "s3://bucket")
    assert json.loads(look("status", "--json", "-C", run).stdout)["loss"]
    assert not list((tmp_path / "cache").rglob("two"))


def test_what_surgeries_left_is_read_too(store: Any, look: Look, tmp_path: Path) -> None:
    """Receipts, an attic, a last promise, and shards with an appended tail."""
    run = make_run(tmp_path / "runs/one", steps=(4, 8, 12))
    write_log(run / "tb", spiked(40, 30))
    for data in ({"rollback": {"to": 8}}, {"set": {"lr": 3e-5}}, {"reset": ["moments"]}):
        opened = Run.open(run)
        surgery.apply(opened, surgery.plan(opened, from_data({"why": "a test", **data})))
    upload(store, run, "runs/one")
    for words in (
        ["status"],
        ["log"],
        ["verify"],
        ["doctor"],
        ["show"],
        ["diff", "--receipt", "0002"],
    ):
        for json_too in ([], ["--json"]):
            here = look(*words, *json_too, "-C", run)
            there = look(*words, *json_too, "-C", "s3://bucket/runs/one")
            assert here.exit_code == there.exit_code in (0, 3, 4), here.output
            said = here.output.replace(str(run), "s3://bucket/runs/one")
            assert there.output.split() == said.split()  # lines break where paths are longer


def test_a_listing_of_many_pages(store: Any, server: str, look: Look, tmp_path: Path) -> None:
    """At 1,000 keys a page; `status` of 100 steps opens the latest alone."""
    run = make_run(tmp_path / "run", steps=[*range(10, 1010, 10)])
    for folder in run.iterdir():
        for number in range(20):
            (folder / f"rng_state_{number}.pth").write_bytes(b"x" * 20)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda p: put(store, p, run), [p for p in run.rglob("*") if p.is_file()]))
    take_times(store, run, "run")
    with proxy(server) as between, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", between.address)
        here = look("status", "--json", "-C", run)
        there = look("status", "--json", "-C", "s3://bucket/run")
        assert there.stdout == here.stdout.replace(str(run), "s3://bucket/run")
        lists = [request for request in between.seen if "list-type=2" in request.path]
        assert len(lists) == 3
        assert len(between.seen) - len(lists) <= 4 and between.sent < 2_000_000


def put(store: Any, path: Path, run: Path) -> None:
    store.put_object(Bucket="bucket", Key=f"run/{path.relative_to(run)}", Body=path.read_bytes())


def test_two_commands_at_once(store: Any, tmp_path: Path) -> None:
    """Each has a mirror that nobody else fills, and both see the same."""
    run = make_run(tmp_path / "run", steps=(4, 8))
    upload(store, run, "run")
    words = [sys.executable, "-m", "ckptsurgeon", "verify", "--level", "3", "-C", "s3://bucket/run"]
    at_once = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = {process.communicate()[0] for process in at_once}
    assert {process.returncode for process in at_once} == {0} and len(said) == 1


def test_a_folder_marker_is_a_folder(store: Any, look: Look, tmp_path: Path) -> None:
    """As the consoles of stores make them: an object of no bytes, whose key ends with a slash."""
    run = make_run(tmp_path / "run")
    for folder in (run, *(path for path in run.rglob("*") if path.is_dir())):
        key = f"run/{folder.relative_to(run).as_posix()}/".replace("./", "")
        store.put_object(Bucket="bucket", Key=key, Body=b"")
    upload(store, run, "run")
    here = look("verify", "--json", "-C", run)
    there = look("verify", "--json", "-C", "s3://bucket/run/")
    assert there.stdout == here.stdout.replace(str(run), "s3://bucket/run")
    assert here.exit_code == there.exit_code == 0


def test_a_look_needs_no_more_than_the_policy_of_the_docs(
    store: Any, server: str, look: Look, tmp_path: Path
) -> None:
    page = (REPO / "docs/remote.md").read_text("utf-8")
    policy = json.loads(page.partition("```json")[2].partition("```")[0])
    granted = {statement["Action"] for statement in policy["Statement"]}
    run = make_run(tmp_path / "run", steps=(4, 8))
    write_log(run / "tb", spiked(40, 30))
    upload(store, run, "run")
    with proxy(server) as between, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", between.address)
        for words in (*([name] for name in LOOKS_IN_BUCKETS if name not in ("diff", "report")),
                      ["verify", "--level", "4"], ["diff", "4", "8"],
                      ["report", "-o", tmp_path / "x.svg"]):  # fmt: skip
            assert look(*words, "-C", "s3://bucket/run").exit_code in (0, 3, 4), words
        used = set()
        for request in between.seen:
            assert request.method == "GET", request
            used.add("s3:ListBucket" if "list-type=2" in request.path else "s3:GetObject")
    assert used == granted and (tmp_path / "x.svg").stat().st_size


def test_what_a_look_costs(store: Any, server: str, look: Look, tmp_path: Path) -> None:
    """Of 64 shards of 1 MB: two requests for each, under way together, and 2 MB in all."""
    run = tmp_path / "run"
    layout.many(run, SHARDS)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda p: put(store, p, run), [p for p in run.rglob("*") if p.is_file()]))
    take_times(store, run, "run")
    with proxy(server) as between, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", between.address)
        between.latency_s = 0.02
        for words, requests in (["status"], 2), (["show"], 0), (["verify"], 2), (["doctor"], 0):
            here = look(*words, "--json", "-C", run)
            between.clear()
            there = look(*words, "--json", "-C", "s3://bucket/run")
            assert there.stdout == here.stdout.replace(str(run), "s3://bucket/run")
            assert len(between.seen) <= requests * SHARDS + 8, words
            assert between.sent < 2_000_000 and between.most <= CONNECTIONS
            assert between.most > 4 or words != ["status"]
