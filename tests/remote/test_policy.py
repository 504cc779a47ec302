"""A surgery asks a store for what the policy of docs/remote.md grants: all of it, and no more."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests.remote.buckets import fill, killed_at, left_over, long_run
from tests.remote.conftest import Look
from tests.remote.proxy import Proxy, Request
from tests.support.launch import REPO

pytestmark = pytest.mark.remote
LAB, PREFIX = "lab", "runs/7b"
"""The bucket of the page, in whose place the test's is, and where the page has its runs."""
RUN = f"s3://bucket/{PREFIX}"
SET = ["set-lr", "3e-5", "--yes", "-C", RUN]
Need = tuple[str, str]
"""An action, and the name of the resource that it is done to."""


def granted() -> set[Need]:
    """What the page's second policy allows: an action, and a pattern of resources."""
    page = (REPO / "docs/remote.md").read_text("utf-8")
    policy = json.loads(page.split("```json")[2].partition("```")[0])
    assert {statement["Effect"] for statement in policy["Statement"]} == {"Allow"}
    assert not any("Condition" in statement for statement in policy["Statement"])
    return {
        (action, statement["Resource"].replace(f":::{LAB}", ":::bucket"))
        for statement in policy["Statement"]
        for action in statement["Action"]
    }


def needed(request: Request) -> Iterator[Need]:
    """What AWS checks of such a request, by its reference of actions; the test fails for a kind of
    request that is not in here."""
    parts = urlsplit(request.path)
    words = parse_qs(parts.query, keep_blank_values=True)
    resource = f"arn:aws:s3:::{unquote(parts.path).strip('/')}"
    kind = (request.method, *sorted({"list-type", "uploads", "uploadId"} & words.keys()))
    action = {
        ("GET", "list-type"): "s3:ListBucket",
        ("GET", "uploads"): "s3:ListBucketMultipartUploads",
        ("GET", "uploadId"): "s3:ListMultipartUploadParts",
        ("GET",): "s3:GetObject",
        ("HEAD",): "s3:GetObject",
        ("PUT",): "s3:PutObject",
        ("PUT", "uploadId"): "s3:PutObject",
        ("POST", "uploads"): "s3:PutObject",
        ("POST", "uploadId"): "s3:PutObject",
        ("DELETE",): "s3:DeleteObject",
        ("DELETE", "uploadId"): "s3:AbortMultipartUpload",
    }[kind]
    yield action, resource
    if request.source:
        yield "s3:GetObject", f"arn:aws:s3:::{request.source}"


def used(requests: Iterable[Request]) -> set[Need]:
    """The grants that these requests need. Fails where one has none."""
    grants, found = granted(), set()
    for request in requests:
        for action, resource in needed(request):
            fitting = {each for each in grants if each[0] == action and fits(resource, each[1])}
            assert fitting, (request, action, resource)
            found |= fitting
    return found


def fits(resource: str, pattern: str) -> bool:
    return fnmatchcase(resource, pattern)


def test_a_surgery_asks_for_what_the_policy_grants(
    store: Any, between: Proxy, look: Look, tmp_path: Path
) -> None:
    """Its undo too, and a `recover` after a surgery that died before it noted its uploads."""
    fill(store, long_run(tmp_path / "run"), PREFIX)
    assert look(*SET).exit_code == 0
    begun = next(each.number for each in between.seen if "uploads" in each.path)
    asked = used(between.seen)
    between.clear()
    assert look("undo", "--yes", "-C", RUN).exit_code == 0
    asked |= used(between.seen)
    assert killed_at(between, begun + 1, look, SET, done=False) == -9
    asked |= used(between.seen)
    between.clear()
    assert look("recover", "-C", RUN).exit_code == 0
    asked |= used(between.seen)
    assert asked == granted()
    assert not store.list_multipart_uploads(Bucket="bucket").get("Uploads")
    assert left_over(store, f"{PREFIX}/") == []


@pytest.mark.parametrize(
    "path", ["/bucket/other/key", "/bucket/runs-2/key", "/other/runs/7b/key", "/bucket?list-type=1"]
)
def test_what_the_policy_does_not_grant_is_told(path: str) -> None:
    """Of a request that is made nowhere: the test can fail."""
    used([Request(0, "GET", "/bucket/runs/7b/key"), Request(1, "GET", "/bucket?list-type=2")])
    with pytest.raises((AssertionError, KeyError)):
        used([Request(0, "DELETE" if "?" in path else "GET", path)])
    with pytest.raises((AssertionError, KeyError)):
        used([Request(0, "PUT", "/bucket/runs/7b/key", "other/runs/7b/key")])
