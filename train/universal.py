"""Universal checkpoints: DeepSpeed's form that any number of ranks can load.

`convert` writes global_step<N>_universal beside the checkpoint that `latest` names; training from
it saves ordinary checkpoints again.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .config import Config
from .errors import TrainError
from .grid import Grid
from .optimizer import live_optimizer
from .run_folder import find_checkpoint, refuse_live_trainer
from .shards import missing, model_states
from .universal_source import SOURCE, SUFFIX, fingerprint

TIED = "tied_modules.embed.word_embeddings.weight"


def universal_checkpoint_info(config: Config) -> dict[str, Any]:
    """What DeepSpeed's converter must know of the parameters, kept in every checkpoint.

    No vocabulary patterns: the padding does not depend on the number of ranks here, and its rows
    are kept as they are."""
    return {
        "universal_checkpoint_version": 0.2,
        "original_vocab_size": config.vocab_size,
        "tp_replicated_parameter_patterns": [
            r".*layernorm\.(weight|bias)",
            r"position_embeddings\.weight",
            rf"(1|{config.num_layers + 2})\.(weight|bias)",
            r".*dense(_4h_to_h)?\.bias",
        ],
        "parameter_with_row_parallelism_patterns": [r".*dense(_4h_to_h)?\.weight"],
        "pipeline_replicated_parameter_patterns": [re.escape(TIED)],
    }


def convert(config: Config) -> Path:
    """Convert the checkpoint that `latest` names, on one process; returns the new folder.

    Nothing is left when it fails. Raises TrainError when it can't be done."""
    root = Path(config.save)
    refuse_live_trainer(root)
    checkpoint = find_checkpoint(root, from_scratch=False)
    assert checkpoint is not None
    _check_convertible(checkpoint, config.zero_stage)
    target = checkpoint.with_name(checkpoint.name + SUFFIX)
    working = root / f".{target.name}.tmp"
    shutil.rmtree(working, ignore_errors=True)
    try:
        # In a folder of its own: the converter also writes a pointer beside its output.
        _run_converter(checkpoint, working / target.name)
        (working / target.name / SOURCE).write_text(json.dumps(fingerprint(checkpoint)))
        shutil.rmtree(target, ignore_errors=True)
        (working / target.name).rename(target)
    finally:
        shutil.rmtree(working, ignore_errors=True)
    return target


def check_target(folder: Path, args: Any, grid: Grid) -> None:
    """Raise TrainError when DeepSpeed can't cut this universal checkpoint for these ranks."""
    if args.zero_stage == 3 and grid.tensor_size > 1:
        raise TrainError(
            f"{folder}: a universal checkpoint of ZeRO 3 holds whole matrices, and DeepSpeed "
            f"does not cut them for tensor_model_parallel_size {grid.tensor_size}",
            next="tensor_model_parallel_size=1",
            untouched="the checkpoint is as it was",
        )


@contextmanager
def names_as_saved(engine: Any, folder: Path, args: Any) -> Iterator[None]:
    """Inside, DeepSpeed looks for each parameter under the name that the checkpoint has for it: a
    pipeline names parameters by the number of their layer, a plain model does not."""
    names = engine.optimizer.param_names
    own = dict(names)
    for parameter, name in own.items():
        if not (folder / "zero" / name).is_dir():
            names[parameter] = _other_name(name, args.num_layers, args.untie_embeddings)
    try:
        yield
    finally:
        names.update(own)


def mend_zero_3(engine: Any, folder: Path) -> None:
    """Undo what DeepSpeed 0.19 gets wrong on loading a universal checkpoint of ZeRO 3: every param
    group gets the hyperparameters of the first, and all states share one step tensor, which each
    would count up."""
    saved = torch.load(folder / "zero" / "optimizer_state.pt", weights_only=False)
    optimizer = live_optimizer(engine)
    groups = saved["optimizer_state_dict"]["param_groups"]
    for group, theirs in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in theirs.items() if key != "params"})
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()


def describe(model: nn.Module, config: Config) -> None:
    """Give a model the attribute that DeepSpeed saves for the converter."""
    model.universal_checkpoint_info = universal_checkpoint_info(config)  # type: ignore[assignment]


def _check_convertible(checkpoint: Path, zero_stage: int) -> None:
    path = checkpoint / model_states(zero_stage)
    if not path.is_file():
        raise TrainError(f"{path}: missing", next="zero_stage=… as in the run's train.yaml")
    args = torch.load(path, map_location="cpu", mmap=True, weights_only=False)["args"]
    absent = missing(checkpoint, args)
    reason, instead = "", "resume on the ranks that saved it"
    if absent:
        reason = f"{', '.join(absent)} missing"
    elif args.zero_stage == 0:
        reason = "DeepSpeed converts optimizers that ZeRO has cut, and this one is whole"
        instead = "resume without --universal: any number of data-parallel ranks loads it"
    elif args.zero_stage == 3 and args.tensor_model_parallel_size > 1:
        reason = "DeepSpeed can't join the tensor ranks of ZeRO 3"
    elif getattr(args, "optimizer", "adamw") != "adamw":
        reason = f"DeepSpeed converts the moments of Adam, not those of {args.optimizer}"
    if reason:
        raise TrainError(f"{checkpoint}: {reason}", next=instead)


def _run_converter(checkpoint: Path, target: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal

    target.mkdir(parents=True)
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(checkpoint),
            output_folder=str(target),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=False,
            inject_missing_state=False,
        )
    )


def _other_name(name: str, num_layers: int, untied: bool) -> str:
    first = "0.word_embeddings.weight" if untied else TIED
    plain = {first: "word_embeddings.weight", f"{num_layers + 3}.head.weight": "head.weight"}
    prefixes = {"1.": "position_embeddings.", f"{num_layers + 2}.": "final_layernorm."}
    prefixes |= {f"{n + 2}.": f"layers.{n}." for n in range(num_layers)}
    pairs = {**plain, **prefixes}
    for piped, own in [*pairs.items(), *((own, piped) for piped, own in pairs.items())]:
        if name == piped or (piped.endswith(".") and name.startswith(piped)):
            return own + name[len(piped) :]
    raise ValueError(f"the layer of {name} is not known")
