"""`doctor` and `status` say when the recorded launch starts other ranks than a step loads on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptsurgeon import Run
from ckptsurgeon.look.doctor import diagnose
from ckptsurgeon.look.finding import Finding
from ckptsurgeon.look.launch_ranks import ranks, started
from tests.cli.conftest import invoke
from tests.conftest import Trained
from tests.support import (
    megatron_bridge,
    megatron_dist,
    megatron_engine,
    megatron_flat,
    megatron_legacy,
)
from tests.support.deepspeed_engine import Options, launched, process_group, resume
from tests.support.launch import launch


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


TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"torchrun --nproc_per_node 8 pretrain.py {TP} 4 {PP}=2", {"ranks": 8, "tp": 4, "pp": 2}),
        (f"srun pretrain_gpt.py {TP} 4 {TP} 2", {"tp": 2}),
        ("python -m train tensor_model_parallel_size=2 save=run", {"tp": 2}),
        ("python train.py model.pipeline_model_parallel_size=2", {"pp": 2}),
        (f"python train.py {TP} $TP {PP} ² {PP} 2x", {}),
        (f"python train.py {TP}", {}),
        (f"python train.py {TP} {'9' * 5000}", {}),
        ("python train.py --note tensor_model_parallel_size 2", {}),
        (f"torchrun --nproc_per_node 4 p.py {TP} 2 --use-checkpoint-args {PP} 2", {"ranks": 4}),
        (f"python train.py --use-mp-args-from-checkpoint-args {TP} 2", {}),
    ],
)
def test_tensor_and_pipeline_ranks_are_those_that_a_command_says_in_numbers(
    line: str, expected: dict[str, int]
) -> None:
    assert started(line.split()) == expected


def told(root: Path, line: object) -> list[Finding]:
    """What is said of a run that this command starts, or so many ranks."""
    line = f"torchrun --nproc_per_node {line} train.py" if isinstance(line, int) else line
    command = json.dumps({"relaunch": {"command": str(line).split()}})
    (root / "ckptsurgeon.yaml").write_text(command)
    return found(root)


def found(root: Path) -> list[Finding]:
    return [item for item in diagnose(Run.open(root)) if " asks for " in item.what]


def test_a_command_of_other_ranks_leads_to_transplant(trained: Trained) -> None:
    root = trained(ranks=2, zero=1)
    assert told(root, 2) == []
    for count in (1, 4):
        (finding,) = told(root, count)
        assert finding.what.endswith("; step 8 loads only as saved, on 2 ranks")
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


def sizes(finding: Finding) -> tuple[str, str]:
    """Those that the launch asks for, and those of the step."""
    wanted, _, kept = finding.what.partition("; step ")
    assert f"saved on {wanted.partition(' asks for ')[2]}: docs/" in repr(finding.next)
    return wanted, kept.partition(", on ")[2]


def test_megatron_lm_loads_legacy_files_on_the_tensor_and_pipeline_ranks_that_saved_them(
    tmp_path: Path,
) -> None:
    root = megatron_legacy.save(tmp_path, tensor=2, pipeline=2)
    assert told(root, f"torchrun --nproc_per_node 64 pretrain_gpt.py {TP} 2 {PP} 2") == []
    assert told(root, "torchrun --nproc_per_node 64 pretrain_gpt.py") == []
    assert told(root, f"pretrain_gpt.py {TP} 4 {PP} 1 --use-checkpoint-args") == []
    (finding,) = told(root, f"torchrun --nproc_per_node 64 pretrain_gpt.py {TP} 4 {PP} 2")
    assert sizes(finding) == ("ckptsurgeon.yaml asks for tp 4", "tp 2")
    (finding,) = told(root, f"pretrain_gpt.py {PP} 1 {TP} 4")
    assert sizes(finding) == ("ckptsurgeon.yaml asks for tp 4, pp 1", "tp 2, pp 2")


def test_a_size_that_no_argument_says_is_not_compared(tmp_path: Path) -> None:
    root = megatron_legacy.save(tmp_path, tensor=1, pipeline=2, tensor_model_parallel_size=None)
    assert told(root, f"pretrain_gpt.py {TP} 4 {PP} 2") == []
    (finding,) = told(root, f"pretrain_gpt.py {TP} 4 {PP} 4")
    assert sizes(finding) == ("ckptsurgeon.yaml asks for pp 4", "pp 2")


@pytest.mark.parametrize(
    ("sharding", "distributed", "bound"),
    [
        ("dp_reshardable", True, True),
        ("dp_zero_gather_scatter", True, True),
        ("dp_reshardable", False, False),
        ("fully_reshardable", True, False),
        ("fully_sharded_model_space", True, False),
        ("", True, False),
    ],
)
def test_torch_dist_is_bound_where_its_loader_refuses_other_ranks(
    tmp_path: Path, sharding: str, distributed: bool, bound: bool
) -> None:
    root = megatron_dist.save(
        tmp_path, sharding=sharding, use_distributed_optimizer=distributed,
        tensor_model_parallel_size=2, pipeline_model_parallel_size=1,
    )  # fmt: skip
    assert told(root, f"torchrun --nproc_per_node 8 pretrain_gpt.py {TP} 2 {PP} 1") == []
    said = told(root, f"torchrun --nproc_per_node 8 pretrain_gpt.py {TP} 2 {PP} 4")
    assert [sizes(each) for each in said] == [("ckptsurgeon.yaml asks for pp 4", "pp 1")] * bound


@pytest.mark.parametrize("named", [False, True])
def test_torch_dcp_and_fsdp_dtensor_load_on_any(tmp_path: Path, named: bool) -> None:
    root = megatron_flat.save(tmp_path, named=named, tensor_model_parallel_size=2)
    assert told(root, f"pretrain_gpt.py {TP} 4") == []


def test_megatron_bridge_says_its_sizes_in_the_config_of_the_step(tmp_path: Path) -> None:
    root = megatron_bridge.save(tmp_path, sharding="dp_reshardable")
    for config in root.glob("iter_*/run_config.yaml"):
        text = config.read_text().replace(
            "optimizer:", "optimizer:\n  use_distributed_optimizer: true"
        )
        config.write_text(text.replace("model:", "model:\n  tensor_model_parallel_size: 2"))
    assert told(root, "python pretrain.py model.tensor_model_parallel_size=2") == []
    (finding,) = told(root, "python pretrain.py model.tensor_model_parallel_size=1")
    assert sizes(finding) == ("ckptsurgeon.yaml asks for tp 1", "tp 2")


@pytest.mark.long
def test_megatron_deepspeed_is_bound_at_each_stage(tmp_path: Path) -> None:
    with megatron_engine.megatron():
        megatron_engine.make(tmp_path)
    assert told(tmp_path, f"deepspeed pretrain_gpt.py {TP} 1 {PP} 1") == []
    (finding,) = told(
        tmp_path, f"deepspeed --num_gpus 2 --num_nodes 2 pretrain_gpt.py {TP} 2 {PP} 2"
    )
    wanted = "ckptsurgeon.yaml asks for 4 ranks, tp 2, pp 2"
    assert sizes(finding) == (wanted, "1 rank, tp 1, pp 1")


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
@pytest.mark.long
def test_the_bundled_trainers_config_is_compared_and_its_trainer_refuses(
    tmp_path: Path, corpus: Path, stage: int, axis: str
) -> None:
    key, root = f"{axis}_model_parallel_size", tmp_path / "run"
    launch(
        "--config=train/configs/tiny.yaml", "--from-scratch", f"save={root}", f"data={corpus}",
        "train_iters=2", "save_interval=2", f"zero_stage={stage}", f"{key}=2", ranks=2,
    )  # fmt: skip
    config = root / "train.yaml"
    assert found(root) == []
    config.write_text(config.read_text().replace(f"{key}: 2", f"{key}: 1"))
    (finding,) = found(root)
    name = {"tensor": "tp", "pipeline": "pp"}[axis]
    assert sizes(finding) == (f"train.yaml asks for {name} 1", f"{name} 2")
    launch(f"--config={config}", "--exit-after-first-line", ranks=2, status=1)
    assert told(root, f"torchrun --nproc_per_node 2 -m train {key}=2") == []
    (finding,) = told(root, f"torchrun --nproc_per_node 2 -m train {key}=1")
    assert sizes(finding)[0] == f"ckptsurgeon.yaml asks for {name} 1"
    config.unlink()
    (root / "ckptsurgeon.yaml").unlink()
    assert found(root) == []
