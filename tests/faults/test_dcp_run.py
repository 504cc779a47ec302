"""Killed or refused by the disk at any call of a surgery on a torch.distributed checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.dcp_run import surgeries
from tests.faults.inject import KILLED
from tests.faults.sweep import faults, faults_in_recovery, reports
from tests.support.megatron_dist import save


@pytest.mark.parametrize(
    ("file", "every"),
    [
        pytest.param(False, 4, id="parts-thin"),
        pytest.param(False, 1, id="parts-dense", marks=pytest.mark.slow),
        pytest.param(True, 1, id="file-dense", marks=pytest.mark.slow),
    ],
)
@pytest.mark.long
def test_a_surgery_is_before_or_after(tmp_path: Path, file: bool, every: int) -> None:
    apply, undo = surgeries(save(tmp_path / "run", integrity=True, file=file))
    found = reports(
        (apply, faults, ("KILL",), (False,), every),
        (undo, faults, ("KILL",), (False,), every),
        (apply, faults, ("ENOSPC",), (False,), 3 * every),
        (undo, faults, ("EIO",), (False,), 3 * every),
        (apply, faults_in_recovery, ("KILL",), (False,), 40 * every),
    )
    violations = [violation for report in found for violation in report.violations]
    assert not violations, "\n".join(violations[:20])
    assert set(found[0].codes) == set(found[1].codes) == {KILLED}
    assert sum(report.points for report in found) >= 150 // every
