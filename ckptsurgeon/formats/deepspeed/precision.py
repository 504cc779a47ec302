"""What a DeepSpeed step must be so that an engine of another precision loads it.

Source: DeepSpeed 0.19, `runtime/engine.py` (`_get_zero_ckpt_prefix`) for the names of the files,
`runtime/zero/stage_1_and_2.py` (`_load_global_state`, `_load_legacy_checkpoint`) and `stage3.py`
(`_rigid_load_state_dict`) for what is read: masters, moments and groups in any precision, and of
ZeRO 1 and 2 a loss scaler if there is one, of ZeRO 3 always. BF16_Optimizer (`bf16_optimizer.py`)
saves the same as ZeRO 1 without a stage and a scaler. Of a universal copy the same is read.
"""

from __future__ import annotations

from pathlib import Path

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.deepspeed.optimizer import OPTIM, Optimizer, around
from ckptsurgeon.formats.deepspeed.shards import DeepSpeedShards
from ckptsurgeon.formats.fields.values import Conversion, Place, Setting
from ckptsurgeon.plans.edits import ABSENT

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
SCALER = ("loss_scaler", "dynamic_loss_scale", "overflow")
"""What a wrapper saves; without it that of ZeRO 1 and 2 keeps the scaler that it was made with."""
STILL = {"cur_scale": 1.0, "scale_factor": 1.0, "min_scale": 0.5, "dynamic": False}
"""A scaler at 1 that never moves (`runtime/fp16/loss_scaler.py`): it grows and shrinks by a factor
of 1, and is never at its smallest, where an overflow would end the run."""


def conversion(checkpoint: DeepSpeedShards, to: str) -> Conversion:
    """New names, flags and what goes. The weights are not among it: those are in `parts`.

    Raises SurgeryError for a stage whose loader of another precision reads other keys."""
    _refuse(checkpoint, to)
    names: dict[Path, str] = {}
    settings: list[Setting] = []
    for item in checkpoint.all_optimizers():
        if match := OPTIM.fullmatch(item.file.name):  # those of a universal copy keep their names
            name = item.file.name.removeprefix(match["dtype"] or "")
            name = f"bf16_{name}" if to == "bf16" else name
            if name != item.file.name:
                names[item.file] = name
        settings += _scaler(checkpoint, item)
    args = checkpoint.args()
    saved = next((name for name in ("bf16", "fp16") if args.get(name)), "fp32")
    flags: dict[str, bool | str] = {"bf16": to == "bf16", "fp16": False}
    if checkpoint.bundled:
        wide = to == "fp32" or checkpoint.stage() > 1
        flags |= {"grad_accum_dtype": "fp32" if wide else "bf16"}
    for key, value in flags.items() if saved != to else ():
        settings += [
            Setting("precision", place, value)
            for place in checkpoint.arguments(key)
            if place.value not in (None, value)
        ]
    return Conversion(DTYPES[to], tuple(settings), names, {"dtype": to}, _launch(checkpoint, to))


def _refuse(checkpoint: DeepSpeedShards, to: str) -> None:
    if checkpoint.stage() > 0:
        return
    wrapped = any("optimizer_state_dict" in around(checkpoint, i) for i in checkpoint.optimizers())
    if wrapped and to == "bf16":
        what = "keeps fp32 masters without the names of their parameters, to round weights from"
    elif wrapped:
        what = "keeps flat moments, and a loader in fp32 asks for those of each parameter"
    elif to == "bf16":
        what = "keeps no fp32 masters, which a loader in bf16 asks for"
    else:
        return
    raise SurgeryError(
        f"{checkpoint.path.name} was saved by ZeRO 0: it {what}",
        next="train with ZeRO 1, whose checkpoints hold any precision, then edit those",
    )


def _of_bf16_optimizer(checkpoint: DeepSpeedShards) -> bool:
    """Whether the wrapper for bf16 with fp32 gradients saved the shards: it writes no stage."""
    items = [item for item in checkpoint.all_optimizers() if OPTIM.fullmatch(item.file.name)]
    return any("zero_stage" not in around(checkpoint, i) for i in items)


def _scaler(checkpoint: DeepSpeedShards, item: Optimizer) -> list[Setting]:
    """The scaler goes, or at ZeRO 3 stands still; nothing where it does already."""
    outer = around(checkpoint, item)
    inside = (*item.outer, "loss_scaler")
    held = {key: checkpoint.value(item.file, (*inside, key)) for key in ("cur_scale", "dynamic")}
    if "loss_scaler" not in outer or held == {"cur_scale": 1.0, "dynamic": False}:
        return []
    if checkpoint.stage() < 3:
        values = {**outer, "loss_scaler": held["cur_scale"]}
        return [
            Setting(
                key.replace("_", " "), Place(item.file, (*item.outer, key), values[key]), ABSENT
            )
            for key in SCALER
            if key in outer
        ]
    changes = [("loss scaler", (*inside, key), value) for key, value in STILL.items()]
    changes += [(key.replace("_", " "), (*item.outer, key), False) for key in SCALER[1:]]
    return [
        Setting(field, place, value)
        for field, path, value in changes
        for place in checkpoint.at(item.file, path)
        if place.value != value
    ]


def _launch(checkpoint: DeepSpeedShards, to: str) -> str:
    """How its trainer is told; the bundled one by its config."""
    if checkpoint.bundled:
        return ""
    if checkpoint.megatron:
        flag = "with --bf16 in place of --fp16" if to == "bf16" else "without --fp16 and --bf16"
        words = f"relaunch {flag}: the command line says in which precision it trains"
    else:
        enabled = '"bf16": {"enabled": true} and ' if to == "bf16" else ""
        without = 'no "fp16"' if to == "bf16" else 'neither "fp16" nor "bf16"'
        words = (
            f"relaunch with {enabled}{without} in the DeepSpeed config: it decides the precision"
        )
    stage = dict(checkpoint.config().get("zero_optimization") or {}).get("stage")
    if to == "fp32" and stage != 1 and _of_bf16_optimizer(checkpoint):
        words += "; and with ZeRO stage 1, as without ZeRO nothing loads these shards in fp32"
    return words
