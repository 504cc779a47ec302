"""Describes an optimizer as a page, and proves the page on what the optimizer really saves.

The optimizer is run by another Python, in which it and torch are installed
(`train/describe_optimizer.py`): it saves, the surgeon edits by the page, and it compares.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ckptsurgeon import disk, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.formats.optimizers.entry import ABSENT_KEY, NOTHING
from ckptsurgeon.formats.optimizers.table import COMMON, STEPS
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run

UNKNOWN = "unknown"
WORD = re.compile(r"[A-Za-z_][\w.]*")
MEANT = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
"""What YAML takes for a switch or for nothing."""
SCRIPT = "describe_optimizer.py"
FORMAT = "torch:step-{step}/optimizer.pt="
TRIED: Mapping[str, Mapping[str, Any]] = {
    "reset": {"reset": ["moments"]},
    "set": {"set": {"lr": "0.5x"}},
    "graft": {"graft": {"step": 7}},
}
"""Each trial of the script, as a recipe."""
Ask = Callable[[str, Path], Mapping[str, Any]]
"""Has the script `save` into a folder, or `compare` what lies there."""


@frozen
class Trial:
    """One operation with some arguments: done and right, `refused` with the reason, or `wrong`."""

    arguments: Mapping[str, str]
    operation: str
    refused: str = ""
    wrong: str = ""


@frozen
class Checked:
    """The page of one optimizer, and what was tried with it."""

    name: str
    page: Mapping[str, Any]
    trials: tuple[Trial, ...]

    @property
    def right(self) -> bool:
        """Whether everything that was done led to what it should."""
        return not any(trial.wrong for trial in self.trials)


def check_optimizer(name: str, arguments: Mapping[str, Any], python: str) -> Checked:
    """Run the class `module.Class` with these arguments by `python`, and prove the page that its
    keys lead to. Raises SurgeryError where it can't be run, or what it saves is not described."""
    given = json.dumps(dict(arguments))

    def ask(act: str, folder: Path) -> Mapping[str, Any]:
        words = [python, str(_script()), act, str(folder), name, given]
        try:
            done = subprocess.run(words, capture_output=True, text=True)
        except OSError as error:
            raise UsageError(
                f"{python}: {error.strerror}", next="--python PATH    with torch and the optimizer"
            ) from None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
            raise SurgeryError(
                f"{name} could not be run: {last}",
                next="--arg NAME=VALUE    what it is built with, or --python PATH",
            )
        answer: Mapping[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return answer

    return check(name, ask)


def check(name: str, ask: Ask) -> Checked:
    """The same, with an optimizer that `ask` runs."""
    with disk.scratch() as folder:
        saved = ask("save", folder)
        page = describe(name, saved)
        file = folder / "page.yaml"
        disk.write_new(file, json.dumps(page).encode())  # which is YAML
        done = [
            {
                trial: _carried_out(folder / str(i) / trial, data, file)
                for trial, data in TRIED.items()
            }
            for i in range(len(saved["variants"]))
        ]
        compared = ask("compare", folder)["variants"]
    trials = tuple(
        Trial(variant["arguments"], trial, refused, "" if refused else wrong[trial])
        for variant, refusals, wrong in zip(saved["variants"], done, compared, strict=True)
        for trial, refused in refusals.items()
    )
    return Checked(name, page, trials)


def _script() -> Path:
    for package in ("ckptsurgeon_train", "train"):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            if disk.is_file(Path(folder) / SCRIPT):
                return Path(folder) / SCRIPT
    raise SurgeryError(f"{SCRIPT} is not installed", next="pip install ckptsurgeon")


def _carried_out(root: Path, data: Mapping[str, Any], page: Path) -> str:
    """Why the recipe was refused; empty if it was done."""
    run = Run.open(root, FORMAT, page)
    try:
        plan = surgery.plan(run, from_data(data), allow_globals=("*",))
    except SurgeryError as error:
        return error.what
    if not plan.empty:
        surgery.apply(run, plan)
    return ""


# --- the page ------------------------------------------------------------------------------------


def describe(name: str, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The page of an optimizer, from what the script found."""
    variants = saved["variants"]
    state: dict[str, str] = {}
    in_place = not any(each["in place"] for each in variants)
    left_out = not any(each["left out"] for each in variants)
    for each in variants:
        for key, kind in each["state"].items():
            if key in STEPS:
                state[key] = "zero"
            elif kind == "stays":
                state.setdefault(key, "constant")
            else:
                state[key] = "zero" if in_place else "anew"
    if not in_place:  # the whole state goes
        state = dict.fromkeys(state, "anew") | {k: "zero" for k in state if k in STEPS}
        if state and set(state.values()) == {"zero"}:
            state = dict.fromkeys(state, "anew")
    groups = {key: found for each in variants for key, found in each["groups"].items()}
    moving = {k for each in variants for k, found in each["groups"].items() if found["moves"]}
    if not groups.get("lr", {}).get("moves"):  # what the last arguments say of it decides
        moving.discard("lr")
    counters = {key: _start(groups[key]) for key in sorted(moving - COMMON)}
    begins = [item for each in variants for item in each["begins"].items()]
    counters |= {key: start for key, start in begins if start[0] == "<"}
    settings = sorted(set(groups) - moving - COMMON)
    reasons = list(_reasons(variants, moving, counters, groups, in_place or left_out))
    entry: dict[str, Any] = {"state": state, "settings": settings}
    if counters:
        entry["counters"] = {k: ("constant" if v == UNKNOWN else v) for k, v in counters.items()}
    if beside := {key: start for each in variants for key, start in each["beside"].items()}:
        entry["beside"] = beside
    if reasons:
        entry["refused"] = "; ".join(dict.fromkeys(reasons))
    return {
        "source": saved["source"],
        "optimizers": {name.rpartition(".")[2]: entry},
    }


def _start(found: Mapping[str, Any]) -> Any:
    """What a counter begins with, as a page says it."""
    if found["absent"]:
        return ABSENT_KEY
    new = found.get("new", UNKNOWN)
    return NOTHING if new is None else new


def _reasons(
    variants: Iterable[Mapping[str, Any]],
    moving: Iterable[str],
    counters: Mapping[str, Any],
    groups: Mapping[str, Any],
    law: bool,
) -> Iterable[str]:
    """Why no reset can make a new one."""
    for each in variants:
        for key, argument in each["begins"].items():
            if argument[0] == "<":
                continue
            yield f"its {key} begins at the argument {argument}, which the checkpoint does not keep"
    if "lr" in moving:
        yield "its lr changes with every update, and begins at an argument that is not kept"
    for key, start in counters.items():
        if start == UNKNOWN:
            yield f"its {key} begins with what is no number"
    if not law:
        yield "neither zeros nor the lack of a state make it a new one"


def page_text(checked: Iterable[Checked]) -> str:
    """One page for these, in YAML. Of several with the same name the first stays."""
    lines: list[str] = []
    for each in checked:
        if not lines:
            lines += [f"source: {each.page['source']}", "optimizers:"]
        for name, entry in each.page["optimizers"].items():
            if f"  {name}:" in lines:
                continue
            lines.append(f"  {name}:")
            lines += [f"    {key}: {_flow(value)}" for key, value in entry.items()]
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_word(k)}: {_word(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_word, value)) + "]"
    return json.dumps(value)


def _word(value: Any) -> str:
    """Bare where YAML reads it as the text that it is."""
    if not isinstance(value, str) or value.lower() in MEANT or not WORD.fullmatch(value):
        return json.dumps(value)
    return value
