"""Whatever a server does, and whoever else writes, a surgery in a bucket is done or not."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon.remote import store as remote_store
from tests.remote import buckets
from tests.remote.buckets import RUN, apart, fill, killed_at, left_over, long_run, objects
from tests.remote.conftest import Look
from tests.remote.proxy import OF_WRITES, Proxy, Request

pytestmark = pytest.mark.remote
SET = ["set-lr", "3e-5", "--yes", "-C", RUN]
UNDO = ["undo", "--yes", "-C", RUN]
SHARD = "checkpoint-8/optimizer.pt"
STRIDE = 4
"""A request of so many has a fault; which one is the first depends on the fault."""


@pytest.fixture
def anew(store: Any, look: Look, tmp_path: Path, between: Proxy) -> Callable[[bool], None]:
    """`anew(done)`: the run is there as it was saved, or as `set-lr` left it."""
    run = long_run(tmp_path / "run")

    def make(done: bool) -> None:
        between.fault = lambda request: None
        for upload in store.list_multipart_uploads(Bucket="bucket").get("Uploads", ()):
            about = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
            store.abort_multipart_upload(Bucket="bucket", **about)
        for key in buckets.keys(store):
            store.delete_object(Bucket="bucket", Key=key)
        fill(store, run)
        if done:
            assert look(*SET).exit_code == 0
        between.clear()

    return make


Case = tuple[list[str], bool, buckets.Objects, buckets.Objects]


def cases(store: Any, look: Look, anew: Callable[[bool], None]) -> list[Case]:
    """Each command, whether it comes after a surgery, and the objects before and after it."""
    anew(False)
    before = objects(store)
    anew(True)
    after = objects(store)
    return [(SET, False, before, after), (UNDO, True, after, before)]


@pytest.mark.parametrize("fault", OF_WRITES[:-1])
def test_a_request_that_fails_once_is_made_again(
    fault: str, store: Any, between: Proxy, look: Look, anew: Callable[[bool], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if fault == "stall":
        monkeypatch.setattr(remote_store, "READ_S", 1)
    first = OF_WRITES.index(fault) % STRIDE
    for words, done, _, after in cases(store, look, anew):
        for number in range(first, 500, 4 * STRIDE if fault == "stall" else STRIDE):
            anew(done)
            between.fault = lambda request, at=number: fault if request.number == at else None
            found = look(*words)
            assert found.exit_code == 0, (words, number, found.output)
            assert objects(store) == after and left_over(store) == [], (words, number)
            if len(between.seen) <= number:
                break
        assert number > 20


@pytest.mark.parametrize("fault", [each for each in OF_WRITES if each not in ("stall", "cut")])
def test_a_server_that_fails_for_good(
    fault: str, store: Any, between: Proxy, look: Look, anew: Callable[[bool], None]
) -> None:
    """With exit code 1 the run is as it was, with 0 or 4 it is as the plan said; with 5, `recover`
    leads to one of both."""
    first, codes = OF_WRITES.index(fault) % STRIDE, set()
    for words, done, before, after in cases(store, look, anew):
        for number in (0, *range(first or STRIDE, 500, STRIDE)):
            anew(done)
            between.fault = lambda request, at=number: fault if request.number >= at else None
            code, said = apart(look, words)
            seen, between.fault = len(between.seen), lambda request: None
            where = (words[0], number, said)
            assert "Traceback" not in said
            codes.add(code)
            now = objects(store)
            if code == 5:
                recovered = look("recover", "-C", RUN)
                assert recovered.exit_code == 0, (*where, recovered.output)
                now = objects(store)
                assert now in (before, after), where
            else:
                assert code in (0, 1, 4), where
                assert now == (before if code == 1 else after), where
                assert code != 4 or "can't be read back" in said, where
            assert left_over(store) == [], where
            if seen <= number:
                break
        assert number > 20
    assert codes >= {0, 1, 5}


def test_a_bucket_that_may_not_be_written(
    store: Any, between: Proxy, look: Look, anew: Callable[[bool], None]
) -> None:
    """Nothing is staged, and the words are about permissions."""
    anew(False)
    before = {
        key: store.head_object(Bucket="bucket", Key=key)["ETag"] for key in buckets.keys(store)
    }
    between.fault = lambda request: None if request.method in ("GET", "HEAD") else "denied"
    found = look(*SET)
    assert found.exit_code == 1
    lines = found.stderr.strip().splitlines()
    assert "says AccessDenied (403)" in lines[-3] and "exactly as it was" in lines[-2]
    assert "docs/remote.md says which permissions" in lines[-1]
    after = {
        key: store.head_object(Bucket="bucket", Key=key)["ETag"] for key in buckets.keys(store)
    }
    assert before == after and left_over(store) == []


def test_a_recovery_that_is_done_is_not_called_interrupted(
    store: Any, between: Proxy, look: Look, anew: Callable[[bool], None]
) -> None:
    """Where nothing answers after its last write."""
    anew(False)
    assert look(*SET).exit_code == 0
    after = objects(store)
    puts = [each for each in between.seen if each.method == "PUT"]
    commit = next(each.number for each in puts if each.path.endswith("/journal"))

    def cut_off() -> None:
        anew(False)
        assert killed_at(between, commit, look, SET, done=True) == -9
        between.clear()

    cut_off()
    assert look("recover", "-C", RUN).exit_code == 0
    last = len(between.seen) - 1
    cut_off()
    between.fault = lambda request: "500" if request.number >= last else None
    code, said = apart(look, ["recover", "-C", RUN])
    between.fault = lambda request: None
    assert code == 4 and "is in force, and the run can't be read back" in said, said
    assert objects(store) == after and left_over(store) == []


def keeps_conditions(store: Any) -> bool:
    """Whether the store completes no upload in place of another object than the one that is meant:
    moto takes no notice of it."""
    about = {"Bucket": "bucket", "Key": "tried"}
    store.put_object(**about, Body=b"x")
    id = store.create_multipart_upload(**about)["UploadId"]
    part = store.upload_part(**about, UploadId=id, PartNumber=1, Body=b"y")
    parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    try:
        store.complete_multipart_upload(
            **about, UploadId=id, MultipartUpload=parts, IfMatch='"other"'
        )
    except store.exceptions.ClientError:
        return True
    finally:
        store.delete_object(**about)
    return False


def test_a_trainer_that_writes_meanwhile_loses_nothing(
    store: Any, between: Proxy, look: Look, anew: Callable[[bool], None]
) -> None:
    """Its bytes are there in the end, or it was later than the surgery was done with the object."""
    anew(False)
    before = objects(store)
    anew(True)
    after = objects(store)
    mine = bytes(reversed(before[SHARD][0]))
    codes, kept = set(), keeps_conditions(store)
    for number in range(500):
        anew(False)

        def save(request: Request, at: int = number) -> None:
            if request.number == at:
                store.put_object(Bucket="bucket", Key=f"run/{SHARD}", Body=mine)

        between.fault = save
        found = look(*SET)
        between.fault = lambda request: None
        now = objects(store)
        here = [request for request in between.seen if request.number == number]
        where = (number, here, found.exit_code, found.output)
        codes.add(found.exit_code)
        assert not kept or now[SHARD][0] == mine or len(between.seen) <= number, where
        if found.exit_code == 1:
            assert {**now, SHARD: before[SHARD]} == before, where
            assert left_over(store) == [], where
        if len(between.seen) <= number:
            assert now == after, where
            break
    assert codes >= {0, 1}


def test_two_surgeons_at_once(store: Any, look: Look, anew: Callable[[bool], None]) -> None:
    """One is refused, or comes after the other; what is there is what the last one said."""
    context = multiprocessing.get_context("fork")
    for _ in range(6):
        anew(False)
        both = [context.Process(target=_set, args=(look, rate)) for rate in ("3e-5", "2e-5")]
        for process in both:
            process.start()
        for process in both:
            process.join()
        codes = [process.exitcode for process in both]
        assert set(codes) <= {0, 1} and 0 in codes, codes
        assert left_over(store) == []
        shown = look("show", "-C", RUN, "--json")
        rates = set(re.findall(r"[23]e-05", shown.stdout))
        assert len(rates) == 1, shown.stdout
        assert codes[0] != 0 or codes[1] == 0 or rates == {"3e-05"}
        assert codes[1] != 0 or codes[0] == 0 or rates == {"2e-05"}
        for _ in range(codes.count(0)):
            assert look(*UNDO).exit_code == 0


def _set(look: Look, rate: str) -> None:
    found = look("set-lr", rate, "--yes", "-C", RUN)
    os._exit(found.exit_code)
