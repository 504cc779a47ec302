"""Killed or refused by the disk at any call of a surgery on a torch.distributed checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.dcp_run import surgeries
from tests.faults.inject import KILLED
from tests.faults.sweep import faults, faults_in_recovery, reports
from tests.support.megatron_dist import save


@pytest.mark.parametrize("file", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_surgery_is_before_or_after(tmp_path: Path, file: bool) -> None:
    apply, undo = surgeries(save(tmp_path / "run", integrity=True, file=file))
    found = reports(
        (apply, faults, ("KILL",)),
        (undo, faults, ("KILL",)),
        (apply, faults, ("ENOSPC",), (False,), 3),
        (undo, faults, ("EIO",), (False,), 3),
        (apply, faults_in_recovery, ("KILL",), (False,), 40),
    )
    violations = [violation for report in found for violation in report.violations]
    assert not violations, "\n".join(violations[:20])
    assert set(found[0].codes) == set(found[1].codes) == {KILLED}
    assert sum(report.points for report in found) >= 150
