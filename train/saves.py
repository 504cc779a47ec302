"""Saves the checkpoints of a run: at once, or in a thread beside training."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from . import distributed
from .checkpoint import save_checkpoint
from .errors import RankError, TrainError
from .host_copy import Room, host_copy
from .log import EventLog
from .retention import REMOVED, remove_old
from .run_folder import LATEST, LATEST_ITERATION, write_atomically
from .training import Training

SAVING = ".global_step{}.saving"
LEFT = re.compile(r"\.global_step\d+\.saving")
TORCHS = ("PytorchStreamWriter", "inline_container")
"""One of these is in what torch says of a full disk; it has no class for that."""
WRITING, WRITTEN, FAILED = 0, 1, -1  # so that the least of all ranks says what holds for all


class Saves:
    """Every rank must call its methods at the same points.

    The pointers name a step only when every rank has written its shards: a run that is killed at
    any moment has a `latest` that names a complete checkpoint. With `async_save` training waits
    for a copy to host memory alone. Then a thread of each rank writes into
    `.global_step<N>.saving`, which becomes `global_step<N>` by one rename when all are done."""

    def __init__(self, training: Training) -> None:
        self._training, self._root = training, Path(training.config.save)
        self._started = training.progress.iteration
        self._writer: _Writer | None = None
        self._room = Room()

    def save(self, events: EventLog | None) -> None:
        """The checkpoint of this iteration. Raises TrainError when the one before it, still being
        written, can't be."""
        if events is not None:
            events.flush()
        step = self._training.progress.iteration
        self.finish()
        if distributed.rank() == 0:
            self._remove_left()
        if not self._training.config.async_save:
            self._write(f"global_step{step}")
            self._name(step)
            return
        self._writer = _Writer(step, self._room)
        with self._writer.taking(self._training.engine.checkpoint_engine):
            self._write(SAVING.format(step))  # begins with a barrier
        self._writer.start()

    def poll(self) -> None:
        """Name the checkpoint that was being written, if it is. Raises TrainError as `save`."""
        if self._writer is None:
            return
        state = torch.tensor(self._writer.state(), device=self._training.device)
        dist.all_reduce(state, op=dist.ReduceOp.MIN)
        if state == WRITING:
            return
        writer, self._writer = self._writer, None
        self._room.empty()
        if state == FAILED:
            raise writer.failure()
        if distributed.rank() == 0:
            self._publish(writer.step)
        self._name(writer.step)

    def finish(self) -> None:
        """Wait until nothing is being written. Raises TrainError as `save`."""
        if self._writer is not None:
            self._writer.join()
            self.poll()

    def _write(self, folder: str) -> None:
        one = self._training
        try:
            save_checkpoint(one.engine, one.config, one.grid, one.progress, one.course, folder)
        except (OSError, RuntimeError) as e:
            if isinstance(e, RuntimeError) and not any(word in str(e) for word in TORCHS):
                raise
            raise _cannot_write(one.progress.iteration, e) from e

    def _publish(self, step: int) -> None:
        written, folder = self._root / SAVING.format(step), self._root / f"global_step{step}"
        _sync_folder(written)
        if folder.exists():  # of a branch that was left
            old = folder.rename(self._root / REMOVED.format(name=folder.name))
            written.rename(folder)
            _remove(old)
        else:
            written.rename(folder)
        _sync_folder(self._root)

    def _name(self, step: int) -> None:
        """In `latest` and in Megatron's tracker; then older checkpoints go, as `keep_last` says."""
        if distributed.rank():
            return
        write_atomically(self._root / LATEST, f"global_step{step}")
        write_atomically(self._root / LATEST_ITERATION, str(step))
        if self._training.config.keep_last is not None:
            remove_old(self._root, step, self._training.config.keep_last, spare=(self._started,))

    def _remove_left(self) -> None:
        """What a killed process was writing: of other ranks, perhaps."""
        for left in self._root.iterdir():
            if LEFT.fullmatch(left.name):
                _remove(left)


class _Writer(Thread):
    """Writes one rank's files of one checkpoint."""

    def __init__(self, step: int, room: Room) -> None:
        super().__init__(daemon=True)  # a process that is told to leave must not wait for it
        self.step, self._room = step, room
        self._files: list[tuple[Any, str]] = []
        self._write: Callable[[Any, str], None] = torch.save
        self._error: Exception | None = None

    @contextmanager
    def taking(self, files: Any) -> Iterator[None]:
        """Inside, what DeepSpeed's checkpoint engine `files` would write is copied instead."""
        self._write = files.save
        files.save = lambda state_dict, path: self._files.append(
            (host_copy(state_dict, self._room), path)
        )
        try:
            yield
        finally:
            del files.save

    def run(self) -> None:
        try:
            while self._files:
                state, path = self._files.pop(0)
                self._write(state, path)
                with Path(path).open("rb") as written:
                    os.fsync(written.fileno())
        except Exception as e:
            self._error = e

    def state(self) -> int:
        """WRITING, WRITTEN or FAILED."""
        if self.is_alive():
            return WRITING
        return WRITTEN if self._error is None else FAILED

    def failure(self) -> TrainError:
        """What to raise once a rank has failed, this one or another."""
        return _cannot_write(self.step, self._error)


def _cannot_write(step: int, error: Exception | None) -> TrainError:
    """`error` is this rank's; None where another one has failed."""
    kind = TrainError if error is None else RankError
    who = "another rank" if error is None else f"rank {distributed.rank()}"
    why = "" if error is None else f": {' '.join(str(error).split()) or repr(error)}"
    return kind(
        f"{who} can't write the checkpoint of iteration {step}{why}",
        untouched=f"{LATEST} names the last complete one",
        next="make room, then start again",
    )


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


def _sync_folder(folder: Path) -> None:
    """So that a power cut leaves the names of its files."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
