"""What a DeepSpeed step must be so that an engine of another precision loads it.

Source: DeepSpeed 0.19, `runtime/engine.py` (`_get_zero_ckpt_prefix`) for the names of the files,
`runtime/zero/stage_1_and_2.py` (`_load_global_state`, `_load_legacy_checkpoint`) for what is read:
masters, moments and groups in any precision, and a loss scaler if there is one.
"""

from __future__ import annotations

from pathlib import Path

from ckptsurgeon.edits import ABSENT
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.pickles.tree import Object, get
from ckptsurgeon.formats.deepspeed.optimizer import OPTIM
from ckptsurgeon.formats.deepspeed.shards import DeepSpeedShards
from ckptsurgeon.formats.values import Conversion, Place, Setting

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
SCALER = ("loss_scaler", "dynamic_loss_scale", "overflow")
"""What the wrapper of fp16 saves; without it a wrapper keeps the scaler that it was made with."""


def conversion(checkpoint: DeepSpeedShards, to: str) -> Conversion:
    """New names, flags and what goes. The weights are not among it: those are in `parts`.

    Raises SurgeryError for a stage whose loader of another precision reads other keys."""
    _refuse(checkpoint)
    names: dict[Path, str] = {}
    settings: list[Setting] = []
    for item in checkpoint.optimizers():
        match = OPTIM.fullmatch(item.file.name)
        assert match is not None  # by `_refuse`
        name = item.file.name.removeprefix(match["dtype"] or "")
        name = f"bf16_{name}" if to == "bf16" else name
        if name != item.file.name:
            names[item.file] = name
        outer = get(checkpoint.trees[item.file], item.outer)
        for key in SCALER:
            if key in outer:
                place = Place(item.file, (*item.outer, key), _told(outer[key]))
                settings.append(Setting(key.replace("_", " "), place, ABSENT))
    flags: dict[str, bool | str] = {"bf16": to == "bf16", "fp16": False}
    if checkpoint.bundled:
        wide = to == "fp32" or checkpoint.stage() > 1
        flags |= {"grad_accum_dtype": "fp32" if wide else "bf16"}
    for key, value in flags.items():
        settings += [
            Setting("precision", place, value)
            for place in checkpoint.arguments(key)
            if place.value is not None
        ]
    return Conversion(DTYPES[to], tuple(settings), names, {"dtype": to}, _launch(checkpoint, to))


def _refuse(checkpoint: DeepSpeedShards) -> None:
    stage = checkpoint.stage()
    if stage == 0:
        raise SurgeryError(
            f"{checkpoint.path.name} is of ZeRO 0: its loader reads other keys in each precision",
            next="train with ZeRO 1, whose checkpoints hold any precision, then edit those",
        )
    if stage == 3:
        raise SurgeryError(
            f"{checkpoint.path.name} is of ZeRO 3, whose loader takes the loss scaler of the file "
            "in every precision",
            next="convert it with DeepSpeed's ds_to_universal, and load that with the new config",
        )
    for item in checkpoint.optimizers():
        outer = get(checkpoint.trees[item.file], item.outer)
        if OPTIM.fullmatch(item.file.name) and "zero_stage" not in outer:
            raise SurgeryError(
                f"{item.file.name} is of BF16_Optimizer (bf16 with fp32 gradients), and no other "
                "precision has such shards",
                next="convert it with DeepSpeed's ds_to_universal, and load that with the new "
                "config",
            )


def _told(value: object) -> float | bool | str:
    """A scaler as a plan shows it: its scale."""
    if isinstance(value, Object):
        scale = value.state.get("cur_scale") if isinstance(value.state, dict) else None
        return float(scale) if isinstance(scale, (int, float)) else "values"
    return bool(value)


def _launch(checkpoint: DeepSpeedShards, to: str) -> str:
    """How its trainer is told; the bundled one by its config."""
    if checkpoint.bundled:
        return ""
    if checkpoint.megatron:
        flag = "with --bf16 in place of --fp16" if to == "bf16" else "without --fp16 and --bf16"
        return f"relaunch {flag}: the command line says in which precision it trains"
    enabled = '"bf16": {"enabled": true} and ' if to == "bf16" else ""
    without = 'no "fp16"' if to == "bf16" else 'neither "fp16" nor "bf16"'
    return f"relaunch with {enabled}{without} in the DeepSpeed config: it decides the precision"
