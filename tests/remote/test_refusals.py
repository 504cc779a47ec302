"""What is not possible in a bucket yet is refused by name, before anything is asked of a server."""

from __future__ import annotations

import shlex
import sys

import pytest

from ckptsurgeon.cli.commands import (
    EDITS_IN_BUCKETS,
    IN_BUCKETS,
    LOOKS_IN_BUCKETS,
    commands,
    examples,
)
from tests.remote.conftest import Look

OTHERS = [name for name in commands() if name not in IN_BUCKETS]


@pytest.fixture(autouse=True)
def _nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("CKPTSURGEON_RUN", raising=False)


@pytest.mark.parametrize("name", OTHERS)
def test_another_command_is_refused(name: str, look: Look) -> None:
    for example in examples(commands()[name].function()):
        words = shlex.split(example)
        own = words[words.index("ckptsurgeon") + 1 :]
        end = own.index("--") if "--" in own else len(own)
        found = look(*own[:end], "-C", "s3://bucket/run", *own[end:])
        assert found.exit_code == 2, (example, found.output)
        if "-C" in own or "--tb" in own:  # another run, or none
            continue
        assert f"`{name}` is not possible in a bucket yet" in found.stderr
        assert "the run is exactly as it was" in found.stderr and not found.stdout


def test_what_only_looks_never_writes() -> None:
    rows = [commands()[name] for name in LOOKS_IN_BUCKETS]
    assert rows and not [row.name for row in rows if row.changes]
    assert all(commands()[name].changes for name in EDITS_IN_BUCKETS)


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["set-lr", "3e-5", "--yes", "--relaunch"], "ckptsurgeon set-lr 3e-5 --yes"),
        (["relaunch", "--check"], "start the trainer by its own command"),
        (["relaunch", "--slurm"], "start the trainer by its own command"),
    ],
)
def test_a_trainer_is_not_started(words: list[str], instead: str, look: Look) -> None:
    found = look(*words, "-C", "s3://bucket/run")
    assert found.exit_code == 2 and "the trainer reads the run elsewhere" in found.stderr
    assert f"next: {instead}" in found.stderr and not found.stdout
    assert "ckptsurgeon -C s3://bucket/run verify --log FILE" in found.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["diff", "s3://bucket/other", "4"],
        ["advise", "--log", "s3://bucket/log.csv"],
        ["status", "--format", "s3://bucket/page.yaml"],
        ["truncate-tb-events", "--after", "4", "--tb", "s3://bucket/tb"],
    ],
)
def test_an_address_elsewhere_is_refused(words: list[str], look: Look) -> None:
    found = look(*words)
    assert found.exit_code == 2 and "only -C takes an address" in found.stderr


@pytest.mark.parametrize("option", ["--on host:8786", "--ranks-from-env"])
def test_who_helps_has_no_mirror(option: str, look: Look) -> None:
    found = look("verify", *option.split(), "-C", "s3://bucket/run")
    assert found.exit_code == 2 and "its helpers have no mirror" in found.stderr
    assert "next: ckptsurgeon verify -C s3://bucket/run" in found.stderr


def test_without_boto3_the_extra_is_named(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3.session", None)
    found = look("status", "-C", "s3://bucket/run")
    assert found.exit_code == 2 and "s3:// needs boto3" in found.stderr
    assert "pip install 'ckptsurgeon[s3]'" in found.stderr
