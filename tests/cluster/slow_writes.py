"""Of a worker that loads this: each of its jobs of a surgery says who does it, in $JOBS, waits for
the file $UNTIL, where one is named, and takes $SECONDS more."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from ckptsurgeon.transaction import job_list


def slow(whole: Any) -> Any:
    """A job of it."""

    def job(*given: Any, **named: Any) -> Any:
        (Path(os.environ["JOBS"]) / str(os.getpid())).touch()
        while "UNTIL" in os.environ and not Path(os.environ["UNTIL"]).exists():
            time.sleep(0.05)
        made = whole(*given, **named)
        time.sleep(float(os.environ["SECONDS"]))
        return made

    return job


if job_list.computing.compute.__name__ != "job":  # Dask executes a preload twice
    job_list.computing.compute = slow(job_list.computing.compute)
