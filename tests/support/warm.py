"""A process that has imported torch and DeepSpeed once, and forks a Python program per request.

Run as `python -m tests.support.warm [MODULE…]`. A request is a line of JSON on stdin; the answer is
the exit status of each rank, in a line on stdout. Each program is a process of its own that starts
as `python -m MODULE` does: with this folder on its path, its own arguments, environment, stdout and
stderr, and nothing imported of this project but what is named. What it shares with its siblings is
the import of the libraries, which nothing has used: no thread, no process group, no kernel.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

LIMIT = 600
"""Seconds until programs that hang are killed."""
GRACE = 30
"""Seconds that the other ranks have to end by themselves when one has failed."""


@dataclass(frozen=True)
class Request:
    """One launch; the ranks share both output files."""

    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    ranks: int
    stdout: str
    stderr: str


def import_libraries(more: Sequence[str] = ()) -> None:
    """What a trainer has imported when it prints its first line; torch's compiler is told first, as
    the trainer does it."""
    import torch

    torch.compiler.set_default_backend("eager")
    import deepspeed.comm.mori
    import deepspeed.module_inject.auto_ep_layer
    import deepspeed.runtime.zero.muon.muon_optimizer
    import omegaconf
    import torch.distributed.checkpoint
    import torch.utils.tensorboard

    assert deepspeed and omegaconf
    with redirect_stdout(sys.stderr):  # answers alone go there
        for module in more:
            importlib.import_module(module)
    inspect.getmodule(import_libraries)  # once, for each definition of a kernel asks for its file
    gc.freeze()  # what all share is no garbage: a look at it would copy it
    assert len([*Path("/proc/self/task").iterdir()]) == 1, (
        "a process with threads is not forked safely"
    )


def start_store() -> tuple[int, int]:
    """A process that keeps the ranks' key-value store, as torchrun's agent does: pid and port."""
    out, into = os.pipe()
    keeper = os.fork()
    if keeper == 0:
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(into, f"{store.port}\n".encode())
        signal.pause()
    os.close(into)
    with os.fdopen(out) as pipe:
        return keeper, int(pipe.readline())


def serve(request: Request) -> list[int]:
    """Start every rank and wait for all: their exit statuses."""
    if request.ranks == 1:
        return wait([fork(request, {})])
    keeper, port = start_store()
    try:
        return wait([fork(request, launched(request, rank, port)) for rank in range(request.ranks)])
    finally:
        os.kill(keeper, signal.SIGKILL)
        os.waitpid(keeper, 0)


def launched(request: Request, rank: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank."""
    count = str(request.ranks)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def fork(request: Request, more: Mapping[str, str]) -> int:
    """The pid of a new process that runs the program."""
    child = os.fork()
    if child == 0:
        try:
            become(request, more)
        finally:
            os._exit(1)
    return child


def become(request: Request, more: Mapping[str, str]) -> NoReturn:
    """Be the program from here on, and leave with its status."""
    files = (os.devnull, os.O_RDONLY), *((name, os.O_WRONLY | os.O_APPEND) for name in (
        request.stdout, request.stderr))  # fmt: skip
    for number, (name, flags) in enumerate(files):
        os.dup2(os.open(name, flags), number)
    os.environ.clear()
    os.environ.update({**request.environment, **more})
    sys.argv = [request.module, *request.arguments]
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    status: Any = 0
    try:
        runpy.run_module(request.module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        status = error.code
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


def wait(children: Sequence[int]) -> list[int]:
    """The exit status of each child; no child is left."""
    ended: dict[int, int] = {}

    def kill(number: int, frame: object) -> None:
        for child in {*children} - ended.keys():
            os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill)
    signal.alarm(LIMIT)
    for _ in children:
        child, status = os.waitpid(-1, 0)
        while child not in children:  # the store's keeper
            child, status = os.waitpid(-1, 0)
        ended[child] = os.waitstatus_to_exitcode(status)
        if ended[child] != 0:
            signal.alarm(GRACE)
    signal.alarm(0)
    return [ended[child] for child in children]


def main() -> None:
    """Serve until stdin ends."""
    import_libraries(sys.argv[1:])
    for line in sys.stdin:
        statuses = serve(Request(**json.loads(line)))
        print(json.dumps(statuses), flush=True)


if __name__ == "__main__":
    main()
