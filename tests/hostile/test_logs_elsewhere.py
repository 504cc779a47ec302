"""A log whose name says no host, on a file system that other hosts write to."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.disk import mount
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data

Trained = Callable[..., Path]


def test_a_log_that_says_no_host_may_be_of_another_one_on_a_server(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = trained()
    log = root / "metrics.csv"
    log.write_text("step,loss\n" + "".join(f"{n},{9 - n}\n" for n in range(1, 9)))
    text = mount.MOUNTS.read_text()

    def on(kind: str) -> None:
        (tmp_path / "mounts").write_text(re.sub(r" - \S+ ", f" - {kind} ", text))
        monkeypatch.setattr(mount, "MOUNTS", tmp_path / "mounts")

    on("ext4")
    assert Run.open(root).writers() == []
    on("lustre")
    (sign,) = Run.open(root).writers()
    assert sign.startswith("metrics.csv: written ") and "maybe from another host" in sign
    wanted = plan(Run.open(root), from_data({"set": {"eps": 1e-6}}))
    with pytest.raises(SurgeryError, match="maybe from another host") as refused:
        surgery.apply(Run.open(root), wanted)
    assert refused.value.untouched == "the run is exactly as it was"
    assert refused.value.next == (
        "stop the trainer, wait until it is gone, then repeat the command",
    )
    quiet = time.time() - 300
    os.utime(log, (quiet, quiet))
    assert Run.open(root).writers() == []
    wanted = plan(Run.open(root), from_data({"rollback": {"to": 6}}))
    surgery.apply(Run.open(root), wanted)  # which cuts the log
    assert Run.open(root).writers() == []
    surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
    with log.open("a") as more:
        more.write("9,0.5\n")
    assert len(Run.open(root).writers()) == 1
