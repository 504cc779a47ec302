"""What an optimizer keeps, found by running it: `python describe_optimizer.py save|compare …`.

ckptsurgeon's `check-optimizer` starts this file by the Python in which the optimizer is installed,
edits what it saved, and has it compare. It needs torch alone, and nothing of the trainer.
"""

from __future__ import annotations

import ast
import copy
import inspect
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":  # started as a file: its package lies one folder up
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from train.optimizer_runs import (
    SECOND,
    Make,
    begun,
    differ,
    following,
    load,
    maker,
    trained,
    update,
    variants,
)

FIRST = 7
"""The earlier of the two steps that are saved; the later one is SECOND."""
TRIALS = ("reset", "set", "graft")
SAVED = "saved"
"""The folder that no trial edits."""
BEGINNING = {"__init__", "__setstate__", "add_param_group", "load_state_dict", "train", "eval"}
"""Methods that no update calls."""
GOES, STAYS = "absent", "constant"
"""What a page says of a key beside states and groups."""


# --- what is found -------------------------------------------------------------------------------


def save(folder: Path, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Train and save each variant for each trial, and say what its keys do."""
    cls = load(name)
    return {
        "source": _source(cls),
        "variants": [
            _saved(folder / str(i), cls, arguments)
            for i, arguments in enumerate(variants(cls, given))
        ],
    }


def _source(cls: Any) -> str:
    from importlib import metadata

    package = cls.__module__.partition(".")[0]
    names = metadata.packages_distributions().get(package, [])
    return f"{names[0]} {metadata.version(names[0])}" if names else str(package)


def _saved(folder: Path, cls: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    make = maker(cls, arguments)
    net, optimizer = trained(make, 0)
    fresh = copy.deepcopy(optimizer.state_dict())
    states, weights = {}, {}
    for seed in range(SECOND):
        update(net, optimizer, seed)
        if seed + 1 in (FIRST, SECOND):
            states[seed + 1] = copy.deepcopy(optimizer.state_dict())
            weights[seed + 1] = copy.deepcopy(net.state_dict())
    for trial in (SAVED, *TRIALS):
        for step in (FIRST, SECOND):
            inside = folder / trial / f"step-{step}"
            inside.mkdir(parents=True)
            torch.save(states[step], inside / "optimizer.pt")
            torch.save(weights[step], inside / "weights")
    one, two = states[FIRST], states[SECOND]
    moving = {key for key in _keys(one) if _of(one, key) != _of(two, key)}
    otherwise = _otherwise(two, begun(weights[SECOND], make), moving)
    groups = _groups(one, two, fresh, _written(cls) - {*inspect.signature(cls).parameters})
    found = {
        "arguments": {key: repr(value) for key, value in arguments.items()},
        "state": {key: _kind(one, key, key in moving) for key in sorted(_keys(one))},
        "groups": groups,
        "begins": _begins(cls, arguments, groups),
    }
    counters = {key: each for key, each in groups.items() if each["moves"]}
    wanted = following(weights[SECOND], make, None)
    for beside in _ways(one, two):
        found["beside"] = beside
        kept = {key: two[key] for key, start in beside.items() if start == STAYS}
        zeroed = None if otherwise else _zeroed(two, moving)
        for how, state in (("in place", zeroed), ("left out", {})):
            made = None if state is None else {**kept, "state": state}
            found[how] = _tried(two, made, counters, weights[SECOND], make, wanted)
        if not (found["in place"] and found["left out"]):
            break
    return found


def _ways(one: Any, two: Any) -> list[dict[str, str]]:
    """What may become of the keys beside states and groups: a new one does without all of them, or
    those that do not move stay."""
    beside = [key for key in one if key not in ("state", "param_groups")]
    moving = {key for key in beside if repr(_text(one[key])) != repr(_text(two.get(key)))}
    gone = dict.fromkeys(beside, GOES)
    return [gone, {key: GOES if key in moving else STAYS for key in beside}] if gone else [gone]


def _tried(
    saved: Any, state: Any, counters: Mapping[str, Any], weights: Any, make: Make, wanted: Any
) -> str:
    """Why the saved groups with this state are no new optimizer; empty if they are."""
    if state is None:
        return "it keeps what is neither a tensor nor a number"
    made = {**state, "param_groups": copy.deepcopy(saved["param_groups"])}
    for group in made["param_groups"]:
        for key, found in counters.items():
            if found["absent"]:
                group.pop(key, None)
            else:
                group[key] = found.get("new")
    try:
        return differ(following(weights, make, made), wanted)
    except Exception as error:  # of the library: it can't load or step so
        return f"{type(error).__name__}: {error}"[:200]


def _zeroed(saved: Any, moving: Iterable[str]) -> Any:
    out: dict[Any, Any] = {}
    for key, each in saved["state"].items():
        if not isinstance(each, dict) or any(map(_is_view, each.items())):
            return None
        out[key] = {}
        for name, value in each.items():
            if name not in moving or value is None:
                out[key][name] = value
            elif isinstance(value, torch.Tensor):
                out[key][name] = torch.zeros_like(value)
            elif isinstance(value, (bool, int, float)):
                out[key][name] = type(value)(0)
            else:
                return None
    return out


def _is_view(entry: tuple[Any, Any]) -> bool:
    """Whether a state keeps more of itself there, by the number of a view of the parameter."""
    return type(entry[0]) is int and isinstance(entry[1], dict)


def _states(saved: Any) -> Iterator[dict[Any, Any]]:
    """The state of each parameter, or of each view of one."""
    for state in saved["state"].values():
        if isinstance(state, dict):
            yield {key: value for key, value in state.items() if not _is_view((key, value))}
            yield from (value for key, value in state.items() if _is_view((key, value)))


def _keys(saved: Any) -> set[str]:
    return {key for state in _states(saved) for key in state}


def _of(saved: Any, key: str) -> str:
    return repr([_text(state.get(key)) for state in _states(saved)])


def _text(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _text(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_text(each) for each in value]
    return value


def _otherwise(saved: Any, new: Any, moving: Iterable[str]) -> set[str]:
    """Keys of the states that no update changes, and that a new optimizer on these weights has
    otherwise: a copy of the weights that it began with."""
    return {
        key for key in (_keys(saved) & _keys(new)) - {*moving} if _of(saved, key) != _of(new, key)
    }


def _kind(saved: Any, key: str, moves: bool) -> str:
    values = [state[key] for state in _states(saved) if key in state]
    plain = all(isinstance(v, (torch.Tensor, bool, int, float, type(None))) for v in values)
    return ("moves" if moves else "stays") + ("" if plain else ", made")


def _written(cls: Any) -> set[str]:
    """The keys of param groups that the source of the class assigns elsewhere than where it begins
    or goes over to evaluation: an update may change them, though none did here."""
    out: set[str] = set()
    for module in {each.__module__ for each in cls.__mro__ if _is_own(each)}:
        for function in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))):
            if isinstance(function, ast.FunctionDef) and function.name not in BEGINNING:
                out |= {*_assigned(function)}
    return out


def _assigned(function: ast.FunctionDef) -> Iterator[str]:
    """The keys that a function assigns in what it calls a group."""
    for node in ast.walk(function):
        match node:
            case ast.Subscript(value=owner, slice=ast.Constant(value=key), ctx=ast.Store()):
                if "group" in ast.unparse(owner):
                    yield str(key)


def _is_own(cls: Any) -> bool:
    """Whether a class is neither of Python nor of torch."""
    return cls.__module__.partition(".")[0] not in ("builtins", "torch", "typing", "abc")


def _groups(one: Any, two: Any, fresh: Any, written: AbstractSet[str]) -> dict[str, dict[str, Any]]:
    """Each key of the param groups: whether it moves, or an update has it `written`, and what a new
    optimizer has there."""
    out: dict[str, dict[str, Any]] = {}
    for mine, its, new in zip(
        one["param_groups"], two["param_groups"], fresh["param_groups"], strict=True
    ):
        for key in mine:
            if key == "params":
                continue
            moves = repr(_text(mine[key])) != repr(_text(its.get(key)))
            moves = moves or repr(_text(mine[key])) != repr(_text(new.get(key))) or key in written
            known = out.setdefault(key, {"moves": False, "absent": key not in new})
            known["moves"] |= moves
            if key in new and isinstance(new[key], (bool, int, float, type(None))):
                known["new"] = new[key]
            known["plain"] = isinstance(mine[key], (bool, int, float, str, type(None), list, tuple))
    return out


def _begins(cls: Any, given: Mapping[str, Any], groups: Mapping[str, Any]) -> dict[str, str]:
    """Moving key of the groups → the argument that says what it begins with, or `<KEY` where the
    groups keep that under another key."""
    out: dict[str, str] = {}
    moving = {key: e["new"] for key, e in groups.items() if e["moves"] and "new" in e}
    settled = {key: each.get("new") for key, each in groups.items() if not each["moves"]}
    for name, parameter in inspect.signature(cls).parameters.items():
        value = given.get(name, parameter.default)
        if not moving or not isinstance(value, float) or not value:
            continue
        try:
            _, other = trained(maker(cls, {**given, name: value * 0.5}), 0)
        except Exception:  # of the library: the argument can't be that
            continue
        begun = other.param_groups[0]
        for key, new in moving.items():
            if key not in begun or begun[key] == new:
                continue
            same = [k for k, its in settled.items() if its == new and begun.get(k) == begun[key]]
            out[key] = f"<{same[0]}" if same else name
    return out


# --- what was edited -----------------------------------------------------------------------------


def compare(folder: Path, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """For each variant and trial, how the edited optimizer differs from what it should be; empty
    where it does not."""
    cls = load(name)
    out = []
    for i, arguments in enumerate(variants(cls, given)):
        make = maker(cls, arguments)
        out.append({trial: _compared(folder / str(i), trial, make) for trial in TRIALS})
    return {"variants": out}


def _compared(folder: Path, trial: str, make: Make) -> str:
    edited = _read(folder / trial / f"step-{SECOND}" / "optimizer.pt")
    weights = _read(folder / SAVED / f"step-{SECOND}" / "weights")
    wanted: Any = None
    if trial != "reset":
        wanted = _read(folder / SAVED / f"step-{SECOND}" / "optimizer.pt")
    if trial == "set":
        for group in wanted["param_groups"]:
            group["lr"] = group["lr"] and group["lr"] * 0.5
    if trial == "graft":
        donor = _read(folder / SAVED / f"step-{FIRST}" / "optimizer.pt")
        wanted["state"] = donor["state"]
        for group, its in zip(wanted["param_groups"], donor["param_groups"], strict=True):
            group.update({key: its[key] for key in ("step",) if key in its})
    try:
        return differ(following(weights, make, edited), following(weights, make, wanted))
    except Exception as error:  # of the library: it can't load or step so
        return f"{type(error).__name__}: {error}"[:200]


def _read(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def main(words: Sequence[str]) -> None:
    """`save` or `compare`, a folder, the class, and its arguments as JSON; prints JSON."""
    act, folder, name, given = words
    own = str(Path(__file__).resolve().parent)  # its modules are not those that the class may be in
    sys.path[:] = [each for each in sys.path[1:] if each != own]
    del sys.modules["train"]
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # a tiny model is not worth a compiler
    acts = {"save": save, "compare": compare}
    print(json.dumps(acts[act](Path(folder), name, json.loads(given))))


if __name__ == "__main__":
    main(sys.argv[1:])
