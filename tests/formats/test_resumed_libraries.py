"""Steps that a library saved after it resumed go on from the step before; where it lost its
optimizer, they do not. Run by `make test-formats`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckptsurgeon import Run, look
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.look.resumed.verdict import AGREES, DIFFERS
from tests.support.launch import run_module

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own making
]
STEP, MORE = 4, 4
FSDP = "hugging_face-fsdp"
LIBRARIES = (
    "hugging_face", FSDP, "hugging_face-zero-1", "hugging_face-zero-2", "hugging_face-zero-3",
    "titan", "fused-titan", "megatron", "tensor-megatron",
)  # fmt: skip


def train(library: str, root: Path, stop: int, *more: str) -> None:
    """To step `stop`, from where the library resumes."""
    words, ranks = ["tests.support.llamas", library], 1
    if library.endswith("megatron"):
        words, ranks = ["tests.support.megatron_llama"], 2 if library != "megatron" else 1
        more = (*more, "--tensor", str(ranks))
    environment = {"PYTHONWARNINGS": "ignore"}
    if library == FSDP:
        environment["ACCELERATE_USE_CPU"], ranks = "true", 2
    run_module(*words, root, stop, *more, ranks=ranks, environment=environment)


@pytest.fixture(scope="module")
def began(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("began")
    for library in LIBRARIES:
        train(library, folder / library, STEP)
    return folder


def verdicts(root: Path, step: int, before: int) -> dict[str, str]:
    """Subject → verdict; where any of a subject differs, it differs."""
    seen: dict[str, str] = {}
    for each in look.verify(Run.open(root), step, against=before).since:
        if seen.get(each.subject) != DIFFERS:
            seen[each.subject] = each.verdict
    return seen


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_that_resumes_goes_on(began: Path, tmp_path: Path, library: str) -> None:
    root = tmp_path / "run"
    shutil.copytree(began / library, root)
    train(library, root, STEP + MORE)
    for before, step in ((2, 4), (4, 5), (4, 6), (4, 8), (7, 8)):
        seen = verdicts(root, step, before)
        assert DIFFERS not in seen.values(), seen
        assert seen["moments"] == seen["parameters"] == AGREES, seen
    assert seen["Adam's counter"] == AGREES


def test_two_ranks_of_accelerate_go_on(tmp_path: Path) -> None:
    """Its numbers count saves, so that the updates in between are Adam's own."""
    environment = {"ACCELERATE_USE_CPU": "true", "PYTHONWARNINGS": "ignore"}
    for stop in (6, 12):
        words = ("tests.support.fsdp2", "accelerate", tmp_path, stop)
        run_module(*words, ranks=2, environment=environment)
    for before, step in ((4, 6), (6, 8), (6, 12), (10, 12)):
        seen = verdicts(tmp_path, step, before)
        assert DIFFERS not in seen.values(), seen
        assert seen["moments"] == seen["parameters"] == AGREES, seen


def test_two_ranks_of_lightning_go_on(tmp_path: Path) -> None:
    for stop in (4, 8):
        saved = sorted(tmp_path.glob(f"checkpoints/*step={STEP}.ckpt"))
        resume = str(saved[0]) if stop > STEP else ""
        words = ("tests.support.lightning_fsdp2", tmp_path, stop, resume)
        environment = {"TORCHELASTIC_RUN_ID": "1", "PYTHONWARNINGS": "ignore"}
        run_module(*words, ranks=2, environment=environment)
    for before, step in ((2, 4), (4, 6), (4, 8)):
        seen = verdicts(tmp_path / "checkpoints", step, before)
        assert DIFFERS not in seen.values(), seen
        assert seen["moments"] == seen["parameters"] == AGREES, seen


@pytest.mark.parametrize("lost", ["all", "half"])
@pytest.mark.parametrize("library", ["hugging_face", FSDP, "titan", "fused-titan"])
def test_an_optimizer_that_was_lost_in_the_load_is_seen_in_the_next_save(
    began: Path, tmp_path: Path, library: str, lost: str
) -> None:
    """As accelerate#3971 and torchtitan#4598: all states, or those of one param group."""
    root = tmp_path / "run"
    shutil.copytree(began / library, root)
    train(library, root, STEP + 1, "--cold", lost)
    assert verdicts(root, STEP + 1, STEP)["moments"] == DIFFERS


def test_states_under_names_that_no_parameter_has_are_seen(began: Path, tmp_path: Path) -> None:
    """FSDP2 leaves them out of the load where it is not strict."""
    root = tmp_path / "run"
    shutil.copytree(began / FSDP, root)
    train(FSDP, root, STEP + 1, "--cold", "names")
    assert verdicts(root, STEP + 1, STEP)["moments"] == DIFFERS


def test_a_trainer_without_optimizer_pt_is_seen(began: Path, tmp_path: Path) -> None:
    """transformers#48569: weights and counters go on, and nothing is printed."""
    root = tmp_path / "run"
    shutil.copytree(began / "hugging_face", root)
    away = (root / f"checkpoint-{STEP}" / "optimizer.pt").rename(tmp_path / "optimizer.pt")
    train("hugging_face", root, STEP + 1)
    with pytest.raises(SurgeryError, match=r"missing: optimizer\.pt"):
        verdicts(root, STEP + 1, STEP)
    away.rename(root / f"checkpoint-{STEP}" / "optimizer.pt")
    seen = verdicts(root, STEP + 1, STEP)
    assert seen["moments"] == seen["Adam's counter"] == DIFFERS
