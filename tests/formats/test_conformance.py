"""Every format of the table in docs/formats.md, and what else is read, keeps the laws of
`tests/support/conformance.py`. A new format adds one run to one of these two."""

from __future__ import annotations

import inspect
import re
import shutil
from abc import ABC
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ckptsurgeon import Run
from ckptsurgeon.formats import Checkpoint, Format, detect
from ckptsurgeon.formats.described.copied import Copied
from tests.formats.matrix import FORMATS
from tests.support import (
    cooled,
    described_runs,
    detectron2_loop,
    epoch_runs,
    lerobot_files,
    more_described_runs,
    nemo_rl,
    prime_rl,
)
from tests.support.conformance import LAWS

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*"),
]

OTHERS: dict[str, Callable[[Path], Path]] = {
    "accelerate": partial(cooled.accelerated, name="CosineAnnealingLR"),
    "composer": described_runs.composer,
    "composer-sharded": described_runs.composer_sharded,
    "automodel": described_runs.automodel,
    "verl": described_runs.verl,
    "lingua": described_runs.lingua,
    "prime-rl": prime_rl.make,
    "nemo-rl": nemo_rl.make,
    "nemo-rl-native": partial(nemo_rl.make, native=True),
    "open-clip": epoch_runs.open_clip,
    "timm": epoch_runs.timm,
    "fairseq2": described_runs.fairseq2,
    "litgpt": described_runs.litgpt,
    "litgpt-finetune": described_runs.litgpt_finetune,
    "mmengine": described_runs.mmengine,
    "nanochat": described_runs.nanochat,
    "lerobot": lerobot_files.run,
    "mmengine-epochs": partial(described_runs.mmengine, by="epoch"),
    "detectron2": detectron2_loop.run,
    "detectron2-plain": partial(detectron2_loop.run, plain=True),
    "coqui": more_described_runs.coqui,
    "nerfstudio": more_described_runs.nerfstudio,
    "rsl-rl": more_described_runs.rsl_rl,
    "detr": more_described_runs.detr,
    "sd-scripts": partial(more_described_runs.sd_scripts, only_steps=True),
}
"""Format without a column in the table, or page → how a run is made. The pages that are not here
take their library."""


LIBRARIES = {
    "lightning", "lightning-sharded", "lightning-deepspeed", "ultralytics", "torchtune", "espnet",
}  # fmt: skip
"""Formats of which only their library makes a run: tests/formats/test_lightning*.py; whose files
name classes that a person must allow: test_described_epochs.py; or that keep one step:
test_saved_over.py."""


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.long
def test_a_format_of_the_table(run_of: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    root = Path(shutil.copytree(run_of(name), tmp_path / "run", symlinks=True))
    for law in LAWS:
        law(root)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.long
def test_a_format_beside_the_table(tmp_path: Path, name: str) -> None:
    root = OTHERS[name](tmp_path / "run")
    for law in LAWS:
        law(root)


@pytest.mark.long
def test_every_format_has_a_run_here(run_of: Callable[[str], Path], tmp_path: Path) -> None:
    roots = [run_of(name) for name in FORMATS]
    roots += [make(tmp_path / name) for name, make in OTHERS.items()]
    formats = [Run.open(root).format for root in roots]
    classes = {type(each).__name__ for each in formats}
    assert {path.rpartition(":")[2] for path in detect.FORMATS} <= classes
    assert {*detect.DESCRIBED} - {each.name for each in formats} == LIBRARIES


@pytest.mark.parametrize(("base", "limit"), [(Checkpoint, 20), (Format, 12)])
def test_the_contract_stays_narrow(base: type[ABC], limit: int) -> None:
    """What a family has for itself, no other room asks; what only few can do is a capability."""
    asked = ASKED[base]
    own = {name for name, _ in inspect.getmembers(base, inspect.isfunction) if name[0] != "_"}
    assert asked <= own and len(asked) <= limit
    assert base.__abstractmethods__ & own <= asked | {"find", "read_state"}
    inside = "|".join(own - asked - ADVICE)
    called = re.compile(rf"(?:checkpoint|donor|format)\.({inside})\(")
    rooms = (path for path in PACKAGE.rglob("*.py") if "formats" not in path.parts)
    found = {path.name: match for path in rooms if (match := called.findall(path.read_text()))}
    assert found == {}


PACKAGE = Path(inspect.getfile(Run)).parents[1]
ADVICE = {
    "advise", "advise_setting", "advise_skip", "advise_rewarm", "launch_flags", "resume_option",
}  # fmt: skip
"""What a layout says of its trainer in sentences: a base class with defaults."""
ASKED: dict[type, set[str]] = {
    Checkpoint: {
        "locate", "state", "contradictions", "state_dicts", "settings", "value", "group_of",
        "beside", "reschedule", "recount", "rescale", "scaler_start", "parts", "known_parts",
        "span", "is_zero", "holder", "globals", "render", "after",
    },
    Format: {
        "recognizes", "steps", "directory", "entries", "files", "missing", "open", "strays",
        "rivals", "pointer_files", "pointers", "pointed",
    },
}  # fmt: skip


def test_copies_answer_for_all_that_may_be_asked() -> None:
    """A method that is not passed on would answer for files that a `Copied` does not have."""
    own = {name for name in vars(Copied) if not name.startswith("__")}
    assert ASKED[Checkpoint] - own == set()
