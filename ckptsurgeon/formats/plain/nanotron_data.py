"""Where a nanotron run is in its data: the stages in the metadata, whose sums a load asserts.

Source: `nanotron/serialize/metadata.py` and `run_train.py` at bdb9d3d (stages), 1dfee7f (tokens of
each folder) and 2411b022 (the length of a sample).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptsurgeon.errors import SurgeryError, count
from ckptsurgeon.files import json_text
from ckptsurgeon.formats.fields.understood import is_count, mapping
from ckptsurgeon.hints import command
from ckptsurgeon.plans.edits import Key

METADATA = "checkpoint_metadata.json"
TOTAL, LAST = ("metas", "consumed_train_samples"), ("metas", "last_train_step")
STAGES = ("metas", "data_stages")
Moves = Iterator[tuple[tuple[Key, ...], int]]


def moved(metas: Mapping[str, Any], total: int, config: Mapping[str, Any]) -> Moves:
    """What else must hold where `total` samples were read: path and value. The samples of the
    current stage are what its sampler begins at, and the total must be their sum; tokens follow.
    Raises SurgeryError for a sample of an earlier stage, and where the tokens can't be told."""
    stages = metas.get("data_stages")
    if not stages:
        return
    number = metas.get("last_stage_idx") or 0
    stage, by = stages[number], total - metas["consumed_train_samples"]
    samples = stage["consumed_train_samples"] + by
    if samples < 0:
        raise SurgeryError(
            f"sample {total} was read in an earlier stage of the data than {stage['name']}",
            next=command("status", why="roll back to a step of that stage"),
        )
    folders = stage.get("consumed_tokens_per_dataset_folder") or {}
    if len(folders) > 1:
        raise SurgeryError(
            f"the data is a blend of {count(len(folders), 'folder')}, and how many samples of each "
            f"come before sample {total} is not known",
            next=command("status", why="roll back to a step before the data"),
        )
    said = stage.get("sequence_length") or mapping(config.get("tokens")).get("sequence_length")
    length = int(said or 0)
    if folders and not length:
        raise SurgeryError(
            "neither the metadata nor config.yaml says how many tokens a sample has",
            next=command("status", why="roll back to a step before the data"),
        )
    path = (*STAGES, number)
    yield (*path, "consumed_train_samples"), samples
    for name in folders:
        yield (*path, "consumed_tokens_per_dataset_folder", name), samples * length
    if metas.get("consumed_tokens_total") is not None:
        yield ("metas", "consumed_tokens_total"), metas["consumed_tokens_total"] + by * length


def refuse_early(metas: Mapping[str, Any], iteration: int) -> None:
    """Raise SurgeryError for an iteration before the current stage, for which a launch makes no
    loader."""
    stages = metas.get("data_stages")
    stage = stages[metas.get("last_stage_idx") or 0] if stages else {}
    if iteration + 1 < stage.get("start_training_step", 0):
        raise SurgeryError(
            f"iteration {iteration} is before the stage {stage['name']} of the data, which began "
            f"at {stage['start_training_step']}",
            next=command("status", why="roll back to a step before that stage"),
        )


def stages_since(run: Path, step: int, newest: int) -> Iterator[str]:
    """Of the stages that began after `step`: a launch trains on the last one of its config, and
    fails where the checkpoint has not begun it. Up to June 2025 a run's metadata has all stages
    from its start on, and none is named."""
    early, late = (_stages(run / str(each) / METADATA) for each in (step, newest))
    if early and len(late) > len(early):
        names = ", ".join(str(mapping(stage).get("name")) for stage in late[len(early) :])
        yield (
            f"the data's stage {names} began after step {step}, and nanotron ends with an error "
            f"where its config has it: relaunch with the data_stages of {step}/config.yaml, or "
            f"with start_training_step: {step + 1}"
        )


def _stages(path: Path) -> Sequence[Any]:
    try:
        stages = mapping(json_text.mapping(path).get("metas")).get("data_stages")
    except (SurgeryError, OSError):
        return ()
    return stages if isinstance(stages, list) else ()


def batch(config: Mapping[str, Any]) -> int | None:
    """The samples of an iteration; None where the config does not say."""
    try:
        tokens, parallel = config["tokens"], config["parallelism"]
        sizes = (
            tokens["micro_batch_size"], tokens["batch_accumulation_per_replica"], parallel["dp"]
        )  # fmt: skip
    except (LookupError, TypeError):
        return None
    return math.prod(sizes) if all(is_count(size) and size for size in sizes) else None
