"""`doctor` and `status` say when the recorded command starts other ranks than a step loads on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptsurgeon import Run
from ckptsurgeon.look.doctor import diagnose
from ckptsurgeon.look.finding import Finding
from ckptsurgeon.look.launch_ranks import ranks
from tests.cli.conftest import invoke
from tests.conftest import Trained
from tests.support.deepspeed_engine import Options, launched, process_group, resume


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("torchrun --nproc_per_node 8 train.py", 8),
        ("torchrun --nproc-per-node=4 --nnodes=2 train.py --nproc_per_node 3", 8),
        ("/opt/bin/torchrun --standalone --nproc_per_node 2 -m train", 2),
        ("torchrun --nproc_per_node 2 --standalone train.py", 2),
        ("python -m torch.distributed.run --nnodes 3 --nproc_per_node 2 train.py", 6),
        ("deepspeed --num_gpus 8 --num_nodes 2 train.py", 16),
        ("deepspeed --num_gpus 8 train.py", None),
        ("torchrun --nproc_per_node auto train.py", None),
        ("torchrun --nnodes 1:4 --nproc_per_node 8 train.py", None),
        ("torchrun --nproc_per_node $GPUS train.py", None),
        ("srun -n 8 python train.py --nproc_per_node 2", None),
        ("torchrun train.py --nproc_per_node 2", None),
        ("torchrun", None),
    ],
)
def test_the_ranks_of_a_command_are_those_that_it_says_in_numbers(
    line: str, expected: int | None
) -> None:
    assert ranks(line.split()) == expected


def told(root: Path, count: int) -> list[Finding]:
    words = f"[torchrun, --nproc_per_node, {count}, train.py]"
    (root / "ckptsurgeon.yaml").write_text(f"relaunch: {{command: {words}}}\n")
    return [item for item in diagnose(Run.open(root)) if " starts " in item.what]


def test_a_command_of_other_ranks_leads_to_transplant(trained: Trained) -> None:
    root = trained(ranks=2, zero=1)
    assert told(root, 2) == []
    for count in (1, 4):
        (finding,) = told(root, count)
        assert "step 8 loads on the 2 that saved it, and on no other number" in finding.what
        assert f"-C NEW transplant --from {root}" in str(finding.next)
        shown = " ".join(invoke("status", "-C", root).stdout.split())
        assert "problem " + " ".join(finding.what.split()) in shown
        assert "-C NEW transplant --from" in shown
        document = json.loads(invoke("status", "--json", "-C", root).stdout)
        (said,) = document["findings"]
        assert said["what"] == finding.what and "transplant" in said["next"]
        assert document["problem"] is None and document["step"] == 8
    assert told(root, 2) == []
    assert json.loads(invoke("status", "--json", "-C", root).stdout)["findings"] == []


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.long
def test_it_is_said_where_the_engine_refuses_and_nowhere_else(tmp_path: Path, stage: int) -> None:
    """What two ranks saved is loaded by one."""
    options = Options(stage=stage)
    with process_group():
        launched("make", tmp_path / "run", options, 2, 2)
        said = told(tmp_path / "run", 1)
        try:
            resume(tmp_path / "run", options, 1)
        except Exception as error:
            assert "world size" in str(error)
            assert len(said) == 1
        else:
            assert said == []
    assert (stage == 0) == (said == [])
