"""Start the trainer from the edited state and hold its first line against the promise."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from ckptsurgeon import hints
from ckptsurgeon.errors import SurgeryError, Unwritten, UsageError, VerificationFailed, count
from ckptsurgeon.launch.kill_switch import KEY, kill_switch
from ckptsurgeon.launch.live_comparison import LiveComparison, way_back
from ckptsurgeon.launch.slurm import Job
from ckptsurgeon.logs.printed.comparison import Comparison
from ckptsurgeon.operations.relaunch import Relaunch
from ckptsurgeon.plans.promise import Promise
from ckptsurgeon.run.run import CONFIG, Run
from ckptsurgeon.run.search import SETTINGS
from ckptsurgeon.transaction.receipts import standing

LIBRARIES = ("torch", "deepspeed", "tensorboard")
"""What the extra `train` installs."""
HUNG = "hung"
"""The file that the bundled trainer's watchdog leaves in the run: torchrun makes 1 of its code."""
STOPPED = "the trainer has trained no step"
TOLERANCE = 1e-12
"""Relative: two implementations of one formula may differ in the last bit, and in no more."""


def command(
    run: Run,
    section: Relaunch | None = None,
    extra: Sequence[str] = (),
    nodes: int | None = None,
) -> list[str]:
    """The argument list that starts the trainer, never a shell string.

    The run's `ckptsurgeon.yaml` decides (`relaunch: {command: [...]}`); else it is the bundled
    trainer with the `train.yaml` that it left in the run, on as many ranks as saved the shards.
    With `nodes` it is what starts the share of one of that many nodes, whose torchrun takes the
    rendezvous from its environment."""
    arguments = [*(section.args if section else []), *extra]
    refuse_unknown_launch(run)
    own = run.settings.get("relaunch")
    if own is not None:
        return [*map(str, own["command"]), *arguments]
    _refuse_without_trainer()
    config = run.root / CONFIG
    module = "ckptsurgeon_train" if importlib.util.find_spec("ckptsurgeon_train") else "train"
    state = run.checkpoint(run.latest()).state()
    ranks = state.data_parallel * state.model_parallel
    if section is not None and section.nproc_per_node is not None:
        ranks = section.nproc_per_node * (nodes or 1)
    if ranks % (nodes or 1):
        raise UsageError(
            f"the checkpoint was saved by {count(ranks, 'rank')}, which {nodes} "
            "nodes can't share evenly",
            next=hints.command("relaunch", "--slurm", "--nodes", math.gcd(ranks, nodes or 1)),
        )
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    launcher = [sys.executable]
    if ranks > 1:
        alone = ["--standalone"] if nodes is None else []
        launcher = [*torchrun, *alone, "--nproc_per_node", str(ranks // (nodes or 1))]
    return [*launcher, "-m", module, "--config", str(config), f"save={run.root}", *arguments]


def _refuse_without_trainer() -> None:
    """Raise when the bundled trainer's libraries are not installed: the surgeon needs none of
    them. They are looked for, and not imported."""
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise SurgeryError(
            f"the bundled trainer needs {', '.join(LIBRARIES)}, and {missing[0]} is not installed",
            next=hints.shell(
                ["pip", "install", "ckptsurgeon[train]"], why="then the same command again"
            ),
        )


def refuse_unknown_launch(run: Run) -> None:
    """Raise when nothing in the run says how its trainer is started."""
    own = run.settings.get("relaunch")
    if own is not None:
        given = own.get("command") if isinstance(own, dict) else None
        plain = isinstance(given, list) and all(isinstance(a, (str, int, float)) for a in given)
        if not plain or not given or "\0" in "".join(map(str, given)):
            raise SurgeryError(
                "ckptsurgeon.yaml: `relaunch.command` must be a list of arguments",
                next="relaunch: {command: [torchrun, --nproc_per_node, '8', train.py]}",
            )
    elif not run.launchable:
        raise SurgeryError(
            f"no launch command is recorded: no {CONFIG} and no ckptsurgeon.yaml",
            next="write `relaunch: {command: [...]}` to ckptsurgeon.yaml in the run",
        )


def job(
    run: Run,
    section: Relaunch | None,
    extra: Sequence[str],
    nodes: int,
    options: Sequence[str],
    requeues: int = 0,
    policy: Path | None = None,
) -> Job:
    """The SLURM job that starts the trainer on `nodes` nodes and compares its first line; one whose
    trainer hung is requeued at most `requeues` times.

    The bundled trainer gets a kill-switch file, which is how the job makes it save before its
    nodes are taken away; for another one `ckptsurgeon.yaml` names it (`relaunch.kill_switch`). With
    a `policy` a watch runs beside it."""
    own = run.settings.get("relaunch")
    argv = command(run, section, extra, nodes)
    hung, stop = None, kill_switch(run)
    if not isinstance(own, dict):
        hung = run.root / HUNG
        if stop is None:
            stop = run.root / "kill-switch"
            argv.append(f"{KEY}={stop}")
    program, here = [sys.executable, "-m", "ckptsurgeon"], ["-C", str(run.root)]
    surgeon = [*program, "relaunch", *here, "--exec", "--"]
    ready = [*program, "ready", *here, "--repair"]
    watch = [] if policy is None else [*program, "watch", str(policy.resolve()), *here]
    return Job(
        run.name, nodes, Path.cwd(), surgeon, argv, stop, options, hung, requeues, ready, watch
    )  # fmt: skip


def relaunch(
    run: Run,
    promise: Promise,
    argv: Sequence[str],
    *,
    check: bool,
    out: TextIO,
    comparison: Comparison | None = None,
    variables: Mapping[str, str] | None = None,
) -> int:
    """Run `argv`, with `variables` in its environment too, pass its output on to `out`, and compare
    its first line with `promise`.

    The bundled trainer waits after its line until it is told to go on, so it trains no step on a
    broken promise. A trainer of the user's own is compared at its first JSON object, wherever
    that comes; else at what it prints and logs of its first updates, which is added to `word`. It
    is stopped when it disagrees; where nothing could be compared, that is said. With `check` the
    trainer is stopped once it was compared. Returns the trainer's exit status; raises
    VerificationFailed when it disagrees."""
    bundled = run.settings.get("relaunch") is None
    if bundled:
        argv = [*argv, "--exit-after-first-line" if check else "--confirm"]
    compared = False
    live = None if bundled or comparison is None else LiveComparison(run, comparison)
    # Python keeps lines back where its output is a pipe: they would come when it is too late.
    unbuffered = {} if live is None else {"PYTHONUNBUFFERED": "1"}
    environment = {**unbuffered, **os.environ, **(variables or {})}
    with _started(run, argv, environment) as trainer, _passed_on(trainer):
        assert trainer.stdin is not None and trainer.stdout is not None
        try:
            for line in trainer.stdout:
                _pass_on(line, out)
                if compared:
                    continue
                if bundled or _is_report(line):
                    differing = compare(promise, line)
                    if differing:
                        raise _broken(run, differing, bundled)
                    compared = True
                elif live is not None:
                    compared = live.feed(line)
                if not compared:
                    continue
                if bundled and not check:
                    trainer.stdin.write("go\n")
                    trainer.stdin.flush()
                elif check and not bundled:
                    trainer.terminate()
        except BaseException:
            trainer.terminate()
            raise
        finally:
            with contextlib.suppress(OSError):
                trainer.stdin.close()
        status = trainer.wait()
    if not compared and live is not None:
        compared = live.end()
    if not compared and (bundled or check):
        raise SurgeryError(
            f"the trainer ended with status {status} before its first line",
            untouched=_untouched(run),
            next=hints.command("relaunch", why="once the cause in its messages above is gone"),
        )
    if not compared:
        print(
            "note: this trainer prints no JSON object of what it uses, and no line that is known "
            "here; nothing was compared",
            file=sys.stderr,
        )
    return 0 if check and not bundled else status


def _started(
    run: Run, argv: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            errors="backslashreplace",  # no byte that a trainer prints is worth its run
        )
    except OSError as error:
        raise SurgeryError(
            f"the trainer can't be started: {argv[0]}: {error.strerror}",
            next=f"correct relaunch.command in {run.root / SETTINGS}"
            if run.settings.get("relaunch")
            else "name a program that is there",
        ) from None


@contextlib.contextmanager
def _passed_on(trainer: subprocess.Popen[str]) -> Iterator[None]:
    """SIGTERM asks the trainer to end, which may save first; its status is then the answer."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python takes signals there alone
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: trainer.send_signal(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _pass_on(line: str, out: TextIO) -> None:
    """Print what the trainer prints. Where a full disk takes no more of it, it goes on unheard."""
    try:
        out.write(line)
        out.flush()
    except Unwritten as error:
        print(f"what the trainer prints is lost from here on: {error.why}", file=sys.stderr)


def _is_report(line: str) -> bool:
    """Whether a line of the user's own trainer is a JSON object of what it uses."""
    if not line.startswith("{"):
        return False
    try:
        report = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(report, dict) and any(name in report for name in Promise.values())


def _untouched(run: Run) -> str:
    return f"the surgery stands; {STOPPED}" if standing(run.receipts()) else STOPPED


def _broken(run: Run, differing: Sequence[str], bundled: bool) -> VerificationFailed:
    stopped = _untouched(run) if bundled else "the trainer was stopped; what it had saved is kept"
    return VerificationFailed(
        f"the trainer does not use what was promised: {'; '.join(differing)}",
        untouched=stopped,
        next=way_back(run),
    )


def compare(promise: Promise, line: str) -> list[str]:
    """The fields in which the trainer's first line differs from the promise, a sentence each.

    A field that the format does not keep (None in the promise) can't be compared."""
    try:
        used = json.loads(line)
    except ValueError:
        used = None
    if not isinstance(used, dict):
        return [f"its first line is not the JSON object of what it uses: {line.strip()[:80]!r}"]
    differing: list[str] = []
    missing: list[tuple[str, str]] = []
    for name in Promise.values():
        promised = getattr(promise, name)
        if promised is None or name in promise.not_known:
            continue
        if name not in used and name in ("optimizer", "groups", "settings"):
            continue  # which no trainer prints yet
        if name not in used:
            missing.append((name, f"{name}: promised {_plain(promised)}, not reported"))
        elif not _same(_plain(promised), used[name]):
            differing.append(f"{name}: promised {_plain(promised)}, uses {used[name]}")
    if len(missing) > 1:
        return [*differing, f"not reported: {', '.join(name for name, _ in missing)}"]
    return [*differing, *(sentence for _, sentence in missing)]


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _same(promised: Any, used: Any) -> bool:
    if isinstance(promised, list):
        return (
            isinstance(used, list)
            and len(used) == len(promised)
            and all(_same(a, b) for a, b in zip(promised, used, strict=True))
        )
    if isinstance(promised, float) and isinstance(used, (int, float)):
        return abs(promised - used) <= TOLERANCE * max(abs(promised), abs(used))
    return bool(promised == used)
