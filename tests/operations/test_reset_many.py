"""A reset of many small tensors in one file is few changes and few writes; no two share a byte."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, apply, disk, plan, plan_undo
from ckptsurgeon.files import native
from ckptsurgeon.plans.as_json import from_json, to_json
from ckptsurgeon.plans.edits import Append, Change, Each
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.report.changes import changes
from ckptsurgeon.report.document import changes_json
from ckptsurgeon.transaction import journal
from tests.support.snapshot import snapshot
from tests.support.tiny_run import GROUP, make_run

PARAMETERS = 40
RESET = from_data({"reset": ["moments"]})
FILE = "checkpoint-4/optimizer.pt"


def state(number: int, numbers: bool) -> dict[str, Any]:
    """What Adam keeps of a parameter of 8 bytes to 24 kB; one of them has moments that are 0."""
    size = 2500 if number % 4 else (2, 1000, 6000)[number % 3]
    fill = torch.zeros if number == 5 else torch.ones
    step = 4 if numbers else torch.tensor(4.0)
    return {"step": step, "exp_avg": fill(size), "exp_avg_sq": fill(size)}


def make(root: Path, numbers: bool) -> Path:
    make_run(root)
    groups = [{**GROUP, "params": list(range(PARAMETERS))}]
    states = {number: state(number, numbers) for number in range(PARAMETERS)}
    torch.save({"state": states, "param_groups": groups}, root / FILE)
    return root


@pytest.fixture(scope="module", params=[True, False], ids=["numbers", "tensors"])
def made(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A run whose step is a number of the pickle, as ZeRO 3 has it, or a tensor for each."""
    return make(tmp_path_factory.mktemp("many"), request.param)


def places(item: object) -> int:
    assert isinstance(item, Change)
    return item.places


def test_one_change_has_all_that_get_the_same_value(made: Path) -> None:
    run = Run.open(made)
    wanted = plan(run, RESET)
    assert [(item.field, places(item)) for item in wanted.changes] == [
        ("exp_avg", PARAMETERS - 1),
        ("exp_avg_sq", PARAMETERS - 1),
        ("adam step", PARAMETERS),
    ]
    rows = {row.label: row.note for row in changes(wanted.changes)}
    assert rows["exp_avg"] == f"{PARAMETERS - 1} places in 1 shard"
    each = changes_json(wanted.changes)
    assert len(each) == 3 * PARAMETERS - 2
    assert [item["path"] for item in each[:6]] == [
        ["state", number, "exp_avg"] for number in (0, 1, 2, 3, 4, 6)
    ]
    assert from_json(json.loads(json.dumps(wanted.changes, default=to_json))) == wanted.changes


def test_the_bytes_are_those_of_a_change_for_each(made: Path) -> None:
    run = Run.open(made)
    checkpoint = run.checkpoint(4)
    wanted = plan(run, RESET).changes
    single = [one for item in wanted if isinstance(item, Change) for one in item.single()]
    together = [item for item in wanted if isinstance(item, Change)]
    assert len(single) > 3 * len(together)
    assert checkpoint.render({FILE: together}, made) == checkpoint.render({FILE: single}, made)


def test_pure_python_writes_the_same_bytes(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if native.shards is None:
        pytest.skip("the native module is not built")
    compiled = plan(Run.open(made), RESET)
    monkeypatch.setattr(native, "shards", None)
    assert plan(Run.open(made), RESET) == compiled
    (edit,) = compiled.edits
    assert isinstance(edit, Append) and len(edit.spans) > PARAMETERS
    assert len(edit.data) < 60_000 < 400_000 < edit.new_size - edit.old_size  # no zeros are kept


def test_no_two_tensors_share_a_byte_and_undo_brings_all_back(made: Path) -> None:
    before = snapshot(made)
    run = Run.open(made)
    apply(run, plan(run, RESET))
    loaded = torch.load(made / FILE, mmap=True, weights_only=True)
    tensors = [value for item in loaded["state"].values() for value in item.values()]
    assert not any(torch.as_tensor(value).any() for value in tensors)
    spans = sorted(
        (value.data_ptr(), value.data_ptr() + value.nbytes)
        for value in tensors
        if isinstance(value, torch.Tensor)
    )
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    del loaded, tensors
    again = Run.open(made)
    assert plan(again, RESET).empty
    apply(again, plan_undo(again))
    assert snapshot(made) == before
    (made / ".ckptsurgeon").rename(made.parent / f"{made.name}.done")


def test_zeros_between_headers_are_written_with_them(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []

    def hook(operation: str, path: str, details: Mapping[str, Any]) -> None:
        if operation == "write" and path.endswith("optimizer.pt"):
            written.append(len(details["data"]))

    run = Run.open(made)
    wanted = plan(run, RESET)
    (edit,) = wanted.edits
    assert isinstance(edit, Append)
    monkeypatch.setattr(disk.calls, "hook", hook)
    journal.commit(made, wanted)
    monkeypatch.undo()
    assert len(edit.spans) > 2 * PARAMETERS / 2
    assert sum(written) == sum(end - start for start, end in edit.runs)
    cut = sum(start >> 20 < end - 1 >> 20 for start, end in edit.runs)  # windows end at a MiB
    assert len(written) == len(edit.runs) + cut + 1 <= 12  # holes stay; the end record is alone
    assert max(written) > 2 * 10_000
    apply(run, plan_undo(Run.open(made)))


def test_a_receipt_with_a_change_for_each_tensor_is_undone(tmp_path: Path) -> None:
    """As surgeries before this wrote it."""
    made = make(tmp_path, numbers=True)
    before = snapshot(made)
    run = Run.open(made)
    receipt = apply(run, plan(run, RESET))
    path = made / ".ckptsurgeon" / "receipts" / receipt.id / "receipt.json"
    document = json.loads(path.read_bytes())
    single = [
        {**change, "path": ["state", key, change["path"][-1]]}
        for change in document["changes"]
        for key in from_json(change["path"][1]).keys
    ]
    assert len(single) == 3 * PARAMETERS - 2
    path.write_text(json.dumps({**document, "changes": single}))
    again = Run.open(made)
    assert len(again.receipts()[0].changes) == len(single)
    apply(again, plan_undo(again))
    assert snapshot(made) == before


@pytest.mark.parametrize(
    "keys", [(0, 1, 2), (7,), (2, 1), ("a", "b"), (0, 2), (0, "a", 2), (True, 2)]
)
def test_keys_are_read_as_they_were_written(keys: tuple[int | str, ...]) -> None:
    text = json.dumps(Each(keys), default=to_json)
    assert from_json(json.loads(text)) == Each(keys)
    assert from_json({"kind": "Each", "keys": [*keys]}) == Each(keys)  # as receipts before had them


def test_a_path_may_stand_for_several() -> None:
    change = Change("f", "x", 1, 2, ("a", Each((0, "b")), "c"))
    assert change.places == 2
    assert list(change.paths()) == [("a", 0, "c"), ("a", "b", "c")]
    assert [one.path for one in change.single()] == [("a", 0, "c"), ("a", "b", "c")]
    alone = Change("f", "x", 1, 2, ("a",))
    assert alone.single() == [alone] and alone.places == 1
