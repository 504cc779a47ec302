"""The end of DeepSpeed's engines that tests have built in the process of the test suite."""

from __future__ import annotations

import gc
import sys
from contextlib import suppress
from pathlib import Path


def end_engines() -> None:
    """Destroy every engine and process group of this process; the next engine makes new ones.

    Each group has threads that wake up a hundred times a second, and an engine that was forgotten
    keeps its groups: its hooks lie in autograd's graph, which Python does not collect."""
    engine = sys.modules.get("deepspeed.runtime.engine")
    if engine is None:
        return
    from deepspeed import comm

    if not comm.is_initialized():
        return
    for item in gc.get_objects():
        # Not isinstance, which asks the item for its class: torch has some that warn then.
        if issubclass(type(item), engine.DeepSpeedEngine) and vars(item):
            item.destroy()
            vars(item).clear()  # its hooks may outlive it, but not with the groups of its grid
    comm.destroy_process_group()
    gc.collect()


def threads_of_groups() -> int:
    """How many threads of process groups this process has now."""
    names = []
    for task in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # another thread ended meanwhile
            names.append(task.read_text("utf-8"))
    return names.count("gloo_tcp_loop\n")
