"""Each refusal leads somewhere: its hints are followed, on the run that was refused, to their end
(see `tests.support.hint_walk`), on each format.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ckptsurgeon import Run
from tests.formats.matrix import FORMATS
from tests.support.hint_walk import COMMANDS, walk
from tests.support.snapshot import snapshot

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*"),
]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("share", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.long
def test_every_hint_leads_to_something_that_works(
    run_of: Callable[[str], Path],
    name: str,
    share: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In `make test` a third of the commands on each format, of each three formats all."""
    root = Path(shutil.copytree(run_of(name), tmp_path / "run", symlinks=True))
    before = snapshot(root)
    monkeypatch.chdir(root)
    words = _words_of(root)
    bad = []
    for command in COMMANDS[[*FORMATS].index(name) % share :: share]:
        bad += walk([words.get(word, word) for word in command.split()])
    assert not bad, "\n".join(bad)
    assert snapshot(root) == before


def _words_of(root: Path) -> Mapping[str, str]:
    run = Run.open(root)
    return {
        "FIRST": str(run.steps()[0]),
        "NEXT": str(run.checkpoint(run.latest()).state().step + 1),
        "BRANCH": str(root.parent / "branch"),
        "EXPORT": str(root.parent / "export"),
    }
