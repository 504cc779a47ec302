"""Which names an edit may have: no plan, receipt or journal reaches what is not the run's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.plans.edits import Append, Content, Edit, Move, Replace, Span, Truncate
from ckptsurgeon.transaction.home import HOME
from ckptsurgeon.transaction.names import refuse_foreign, refuse_foreign_staging

RUN = Path("/exp/run")
LOGS = [Path("/exp/logs"), Path("/data/tb")]
ATTIC, STAGED = f"{HOME}/attic/0001", f"{HOME}/staging/0002"


def refused(*edits: Edit, root: Path = RUN, known: tuple[str, ...] = ()) -> bool:
    try:
        refuse_foreign(root, LOGS, edits, "the plan", known)
    except SurgeryError as error:
        assert error.what
        assert error.next
        return True
    return False


def edits_of(name: str) -> dict[str, Edit]:
    """Each place in which an edit names a file."""
    text = Content((b"x",))
    return {
        "moved away": Move(name, f"{ATTIC}/x"),
        "moved here": Move(f"{STAGED}/x", name, text),
        "replaced": Replace(name, f"{STAGED}/x", f"{ATTIC}/x", text),
        "staged": Replace("latest", name, f"{ATTIC}/x", text),
        "kept": Replace("latest", f"{STAGED}/x", name, text),
        "appended to": Append(name, 1, b"x", ((1, 2),), 0),
        "truncated": Truncate(name, 1, 2, "", ((1, 2),), 0),
        "copied": Replace(
            "latest", f"{STAGED}/x", f"{ATTIC}/x", Content((Span(name, 0, 1),))
        ),
        "whose rights are copied": Move(f"{STAGED}/x", "new", text, like=name),
    }  # fmt: skip


FOREIGN = (
    "", ".", "..", "/etc/passwd", "../victim", "../../etc/passwd", "a/../../victim", "a/../latest",
    "./latest", "a//b", "a/", "lat\0est", "../logs", "../logs/../victim", "../logs2/tfevents",
    "../../data/tb/../tfevents", "../run/latest",
)  # fmt: skip

EDITED = sorted(set(edits_of("x")) - {"copied", "whose rights are copied"})
"""Those of them that change the file."""


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("place", edits_of("x"))
@pytest.mark.long
def test_a_name_that_leads_elsewhere_is_refused_wherever_it_stands(place: str, name: str) -> None:
    assert refused(edits_of(name)[place])


@pytest.mark.parametrize("place", EDITED)
def test_outside_of_the_run_only_event_files_are_edited(place: str) -> None:
    assert refused(edits_of("../logs/notes.txt")[place])
    in_passing = place in ("moved away", "moved here", "staged", "kept")
    assert refused(edits_of(f"../logs/{ATTIC}/notes.txt")[place]) is not in_passing
    event_file = place not in ("staged", "kept")
    assert refused(edits_of("../logs/events.out.tfevents.1")[place]) is not event_file
    assert refused(edits_of("../../data/tb/a/events.out.tfevents.1")[place]) is not event_file


@pytest.mark.parametrize(
    "name", [HOME, f"{HOME}/lock", f"{HOME}/journal", f"{HOME}/receipts/0001/receipt.json",
             f"{HOME}/attic/0001", f"{HOME}/staging/../lock", f"{HOME}/attic/../../victim/x",
             f"{HOME}/attic/x/y", f"other/{HOME}/attic/0001/x"],
)  # fmt: skip
@pytest.mark.parametrize("place", EDITED)
def test_no_record_of_the_surgeon_is_edited(place: str, name: str) -> None:
    assert refused(edits_of(name)[place])


@pytest.mark.parametrize("place", ["replaced", "appended to", "truncated"])
def test_what_is_in_the_attic_is_not_edited(place: str) -> None:
    assert refused(edits_of(f"{ATTIC}/latest")[place])


@pytest.mark.parametrize("place", edits_of("x"))
def test_the_runs_own_files_are_edited(place: str) -> None:
    if place not in ("staged", "kept"):
        for name in ("latest", "global_step8/mp_rank_00.pt", "a b/ü\udcff", "..x/y", "x..", "-n"):
            assert not refused(edits_of(name)[place]), name


def test_bytes_may_come_from_a_file_elsewhere_that_the_plan_has_fingerprinted() -> None:
    edit = edits_of("../other/step4/optim.pt")["copied"]
    assert refused(edit)
    assert not refused(edit, known=("../other/step4/optim.pt",))


@given(st.text("ab./~\0 ", max_size=12), st.sampled_from(sorted(edits_of("x"))))
def test_what_is_accepted_is_below_the_run_or_a_log_folder(name: str, place: str) -> None:
    if not refused(edits_of(name)[place]):
        path = os.path.normpath(RUN / name)
        assert any(path.startswith(f"{folder}/") for folder in (RUN, *LOGS))
        assert "/../" not in f"{RUN}/{name}/".replace(f"{RUN}/../", "", 1)


# --- links ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", EDITED)
def test_no_folder_on_the_way_is_a_link_but_the_file_may_be_one(place: str, tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    root.mkdir()
    (elsewhere / "attic/0001").mkdir(parents=True)
    (root / "step4").symlink_to(elsewhere)
    if place in ("staged", "kept"):
        assert not refused(edits_of(f"{HOME}/attic/0001/x")[place], root=root)
        (root / HOME).symlink_to(elsewhere)
        assert refused(edits_of(f"{HOME}/attic/0001/x")[place], root=root)
    else:
        assert not refused(edits_of("step4")[place], root=root)
        assert refused(edits_of("step4/shard")[place], root=root)
        assert refused(edits_of("step4/deep/er/shard")[place], root=root)


# --- the journal's own lists ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "folders"),
    [(["../victim"], []), (["latest"], []), ([f"{HOME}/lock"], []), ([f"{HOME}/attic/0001/x"], []),
     ([f"{HOME}/receipts/0002/receipt.json"], []), ([f"{HOME}/staging/0003.tails"], []),
     ([], ["../victim"]), ([], ["/tmp"]), ([], ["../logs/.."]), ([], [""])],
)  # fmt: skip
def test_a_journal_takes_back_nothing_but_what_it_staged(
    files: list[str], folders: list[str]
) -> None:
    with pytest.raises(SurgeryError, match="the journal"):
        refuse_foreign_staging(RUN, LOGS, "0002", files, folders)


@pytest.mark.parametrize("id", ["", "1", "../../victim", "0002/..", "²²²²", "0002\n"])
def test_the_id_of_a_journal_is_that_of_a_surgery(id: str) -> None:
    with pytest.raises(SurgeryError, match="is not the id of a surgery"):
        refuse_foreign_staging(RUN, LOGS, id, [], [])


def test_a_journal_takes_back_what_it_staged() -> None:
    files = [f"{STAGED}/step4/shard", f"{HOME}/staging/0002.tails", f"../logs/{STAGED}/tf-events"]
    folders = [HOME, f"{HOME}/attic/0002", "step4/new", "../logs", f"../logs/{HOME}", "../logs/cut"]
    refuse_foreign_staging(RUN, LOGS, "0002", files, folders)
