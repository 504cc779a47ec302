"""Splicing does what plain Python does to the loaded tree, and changes no byte beside it."""

from __future__ import annotations

import argparse
import collections
import difflib
import io
import pickle
from typing import Any

import pytest
import torch._weights_only_unpickler as weights_only

from ckptsurgeon.errors import DamagedFile, SurgeryError
from ckptsurgeon.files.pickles.splice import splice
from ckptsurgeon.files.pickles.tree import get
from tests.support.torch_files import read

PROTOCOLS = (2, 3, 4, 5)


def tree() -> dict[str, Any]:
    betas = (0.9, 0.99)
    names = ["first", "second"]
    args = argparse.Namespace(seed=3, lr=1e-4)
    args.itself = args
    ordered = collections.OrderedDict(a=1, b=betas)
    ordered._metadata = {"version": 1}  # type: ignore[attr-defined]
    return {
        "groups": [{"lr": 1e-4, "betas": betas, "eps": 1e-8, "on": True} for _ in range(3)],
        "names": names,
        "second": names[1],
        "args": args,
        "ordered": ordered,
        "range": list(range(3000)),
        "empty": {},
        "state": {i: {"step": i} for i in range(2000)},
        "counts": collections.defaultdict(int, a=1),
        7: "int key",
    }


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("path", "new"),
    [
        (("groups", 0, "lr"), 3e-5),
        (("groups", 2, "lr"), 0.0),
        (("groups", 0, "betas"), (0.8, 0.95)),
        (("groups", 1, "betas"), (0.8, 0.95)),
        (("groups", -1, "eps"), float("inf")),
        (("groups", 1, "on"), False),
        (("groups", 1, "on"), None),
        (("groups",), [1, (2, "x"), []]),
        (("names",), "gone"),
        (("names", 1), "changed"),
        (("second",), 2**70),
        (("args", "seed"), -5),
        (("ordered", "b"), ()),
        (("range", 2500), 2**31),
        (("state", 1999, "step"), 255),
        (("state", 0), 256),
        (("counts", "a"), 65536),
        ((7,), "ü\ud800"),
        (("empty", "inserted"), 1.5),
        (("groups", 1, "inserted"), "text"),
        (("ordered", "inserted"), -1),
        (("args", "inserted"), [0.5]),
        ((8,), -(2**40)),
    ],
)
def test_sets_what_plain_python_sets(protocol: int, path: tuple[Any, ...], new: Any) -> None:
    data = pickle.dumps(tree(), protocol)
    expected = pickle.loads(data)
    assign(expected, path, new)
    result = splice(data, {path: new})
    assert pickle.dumps(pickle.loads(result), 2) == pickle.dumps(expected, 2)
    assert repr(get(read(result), path)) == repr(new)


def assign(root: Any, path: tuple[Any, ...], new: Any) -> None:
    for key in path[:-1]:
        root = getattr(root, str(key)) if isinstance(root, argparse.Namespace) else root[key]
    if isinstance(root, argparse.Namespace):
        setattr(root, path[-1], new)
    else:
        root[path[-1]] = new


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_many_edits_at_once_with_deletions(protocol: int) -> None:
    data = pickle.dumps(tree(), protocol)
    expected = pickle.loads(data)
    edits: dict[tuple[Any, ...], Any] = {
        ("groups", 0, "betas"): (0.8, 0.95),
        ("groups", 1, "lr"): 1.0,
        ("state", 7, "step"): 0,
        ("state", 7, "extra"): None,
        ("names",): [],
    }
    for path, new in edits.items():
        assign(expected, path, new)
    del expected["groups"][0]["lr"], expected["groups"][2]["lr"], expected["state"][5]
    del expected["range"][0], expected["counts"]["a"], expected["groups"][1]["eps"]
    deleted: list[tuple[Any, ...]] = [
        ("groups", 0, "lr"), ("groups", 2, "lr"), ("state", 5), ("range", 0), ("counts", "a"),
        ("groups", 1, "eps"),
    ]  # fmt: skip
    result = splice(data, edits, delete=deleted)
    assert pickle.dumps(pickle.loads(result), 2) == pickle.dumps(expected, 2)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_one_float_changes_its_eight_bytes_only(protocol: int) -> None:
    data = pickle.dumps(tree(), protocol)
    result = splice(data, {("groups", 1, "lr"): 3e-5})
    assert len(result) == len(data)
    assert sum(a != b for a, b in zip(data, result, strict=True)) <= 8


def test_other_bytes_stay_when_the_length_changes() -> None:
    data = pickle.dumps(tree(), 2)
    result = splice(data, {("args", "seed"): "a text"})
    start = next(i for i in range(len(data)) if data[i] != result[i])
    rest = len(data) - start - len(pickle.dumps(3, 2)) + 3
    assert result.endswith(data[-rest + 3 :])


def test_types_stay_unless_the_caller_changes_them() -> None:
    data = pickle.dumps({"lr": 1.0, "betas": (0.9, 1), "list": [1.0, 2], "n": 3, "flag": True}, 2)
    result = splice(
        data, {("lr",): 2, ("betas",): [1, 2], ("list",): (3, 4), ("n",): 2.5, ("flag",): 1}
    )
    assert repr(pickle.loads(result)) == (
        "{'lr': 2.0, 'betas': (1.0, 2), 'list': [3.0, 4], 'n': 2.5, 'flag': 1}"
    )


def test_a_shared_value_stays_for_its_other_holders_and_weights_only_still_loads() -> None:
    betas, text = (0.9, 0.99), "shared text"
    data = pickle.dumps([betas, betas, text, {text: [text, betas]}, betas], 2)
    for edits, expected in (
        ({(0,): 1}, [1, betas, text, {text: [text, betas]}, betas]),
        ({(1,): 1}, [betas, 1, text, {text: [text, betas]}, betas]),
        ({(0,): 1, (1,): 2, (2,): 3}, [1, 2, 3, {text: [text, betas]}, betas]),
        ({(0,): 1, (3,): 2, (1,): 3}, [1, 3, text, 2, betas]),
        ({(0,): 0, (1,): 0, (3,): 0, (4,): 0}, [0, 0, text, 0, 0]),
    ):
        result = splice(data, edits)
        assert pickle.loads(result) == expected
        assert weights_only.load(io.BytesIO(result)) == expected
        assert read(result) == expected


def test_nested_shared_values_move_to_their_first_readers() -> None:
    inner, outer_key = ("inner", "parts"), "key"
    outer = [inner, {outer_key: 1}]
    for later in ([inner, outer], [outer, inner], [outer_key, "parts", outer, inner], [outer[1]]):
        data = pickle.dumps([outer, later, outer[1], inner], 2)
        expected = pickle.loads(data)
        expected[0] = 5
        result = splice(data, {(0,): 5})
        assert pickle.dumps(weights_only.load(io.BytesIO(result)), 2) == pickle.dumps(expected, 2)


def test_a_cycle_moves_to_those_who_share_its_parts() -> None:
    cycle: list[Any] = ["part"]
    cycle.append([cycle])
    data = pickle.dumps([cycle, cycle[1], "part"], 2)
    for load in (pickle.loads, lambda data: weights_only.load(io.BytesIO(data))):
        result = load(splice(data, {(0,): None}))
        assert result[0] is None and result[1][0][1] is result[1] and result[2] == "part"


def test_a_tuple_that_holds_itself_is_popped_where_it_was() -> None:
    inside: list[Any] = []
    inside.append((inside, inside))
    data = pickle.dumps([inside[0], inside, inside[0]], 2)
    result = pickle.loads(splice(data, {(0,): None}))
    assert result[0] is None and result[1][0] is result[2] and result[2][1] is result[1]


def test_a_path_leads_through_shared_containers() -> None:
    group = {"lr": 1.0}
    data = pickle.dumps([group, group], 2)
    assert pickle.loads(splice(data, {(1, "lr"): 2.0})) == [{"lr": 2.0}, {"lr": 2.0}]


def test_a_part_of_a_shared_tuple_is_refused() -> None:
    betas = (0.9, 0.99)
    data = pickle.dumps([betas, betas, (0.5, 0.6)], 2)
    assert pickle.loads(splice(data, {(2, 0): 0.1})) == [betas, betas, (0.1, 0.6)]
    with pytest.raises(SurgeryError, match="other values share"):
        splice(data, {(0, 0): 0.1})
    group = {"lr": 1.0}
    around = ((group, (2, 3)),)
    data = pickle.dumps([around, around], 2)
    assert pickle.loads(splice(data, {(1, 0, 0, "lr"): 2.0}))[0] == (({"lr": 2.0}, (2, 3)),)
    with pytest.raises(SurgeryError, match="other values share"):
        splice(data, {(0, 0, 1, 0): 0.1})


def test_attributes_that_another_dict_shares_are_refused() -> None:
    args = argparse.Namespace(seed=1)
    data = pickle.dumps({"args": args, "hyper_parameters": vars(args)}, 2)
    assert pickle.loads(splice(data, {("hyper_parameters",): 1}))["args"].seed == 1
    for path in (("args", "seed"), ("args", "new")):
        with pytest.raises(SurgeryError, match="other values share"):
            splice(data, {path: 2})


def test_frames_are_resized_and_may_be_crossed() -> None:
    value = {"a": list(range(40000)), "pairs": [(float(i), "x" * 50) for i in range(4000)], "z": 1}
    data = pickle.dumps(value, 4)
    assert data.count(b"\x95") > 2
    expected = pickle.loads(data)
    edits: dict[tuple[Any, ...], Any] = {("a", i): "longer text" for i in range(0, 40000, 997)}
    for i in range(4000):
        edits["pairs", i] = (1.0, "y") if i % 3 else ()
    for path, new in edits.items():
        assign(expected, path, new)
    result = splice(data, edits)
    assert pickle.loads(result) == expected
    assert pickle._loads(result) == expected  # type: ignore[attr-defined]  # checks each frame


@pytest.mark.parametrize(
    "path", [("absent", "lr"), ("groups", 9), ("groups", "lr"), ("names", "x"), ("second", 0), ()]
)
def test_a_path_that_leads_nowhere_is_named(path: tuple[Any, ...]) -> None:
    data = pickle.dumps(tree(), 2)
    with pytest.raises(KeyError) as error:
        splice(data, {path: 1})
    assert error.value.args[0] == path[: len(error.value.args[0])]
    with pytest.raises(KeyError):
        splice(data, {}, delete=[path])


def test_what_has_no_one_meaning_is_refused() -> None:
    data = pickle.dumps({"a": {"b": 1}, "t": (1, 2)}, 2)
    with pytest.raises(SurgeryError, match="overlap"):
        splice(data, {("a",): 1, ("a", "b"): 2})
    with pytest.raises(SurgeryError, match="item of a tuple"):
        splice(data, {}, delete=[("t", 0)])
    twice = b"\x80\x02}(X\x02\x00\x00\x00lrK\x01X\x02\x00\x00\x00lrK\x02u."
    with pytest.raises(DamagedFile, match=r"byte 13: the key 'lr' is twice"):
        splice(twice, {("lr",): 1})
    with pytest.raises(TypeError, match="dict can't be set"):
        splice(data, {("a",): {}})  # type: ignore[dict-item]


def test_nothing_to_do_changes_nothing() -> None:
    for protocol in PROTOCOLS:
        data = pickle.dumps(tree(), protocol) + b"trailing"
        assert splice(data, {}) == data
        same = splice(data, {("groups", 0, "lr"): 1e-4})
        assert same == data, list(difflib.ndiff([data.hex()], [same.hex()]))
