"""The files of a Trainer's or Accelerate's step that have weights: safetensors, or torch's.

Names: `transformers/trainer.py` (`_load_from_checkpoint`), `accelerate/checkpointing.py`
(`load_accelerator_state`), `accelerate/utils/constants.py`. What a load prefers comes first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files import json_text
from ckptsurgeon.formats.fields.constants import SAFE
from ckptsurgeon.formats.fields.understood import understood
from ckptsurgeon.hints import command

WHOLE = re.compile(
    r"(?:model|adapter_model)(?:_\d+)?\.safetensors"
    r"|(?:pytorch_model|adapter_model)(?:_\d+)?\.bin|pytorch_model_fsdp(?:_\d+)?\.bin"
)
INDEX = re.compile(r"model\.safetensors\.index\.json|pytorch_model\.bin\.index\.json")
ORDER = ("pytorch_model_fsdp", "model", "pytorch_model", "adapter_model")
"""FSDP loads its own file; the Trainer takes safetensors before torch's, and a whole file first."""


def files(folder: Path) -> dict[str, list[Path]]:
    """The files of each set that holds all weights, by a name that tells the sets apart in every
    step, `0` for the first. Raises SurgeryError where a file that an index names is not there, and
    where adapters lie in folders of their own."""
    names = sorted(item.name for item in folder.iterdir())
    found = {name: [folder / name] for name in names if WHOLE.fullmatch(name)}
    found |= {name: _indexed(folder / name) for name in names if INDEX.fullmatch(name)}
    for name in names:
        if any(disk.is_file(folder / name / f"adapter_model{end}") for end in (SAFE, ".bin")):
            raise SurgeryError(
                f"{folder.name} holds several adapters, one of them in {name}, and which is "
                "trained is not known here",
                next="graft and reset work on the moments of all parameters",
            )
    ordered = sorted(found, key=_preferred)
    return {name if i else "0": found[name] for i, name in enumerate(ordered)}


def models(found: Mapping[str, Sequence[Path]]) -> int:
    """Of how many models these sets are: Accelerate numbers those after the first."""
    numbers = (re.search(r"_(\d+)\.", paths[0].name) for paths in found.values() if paths)
    return len({match[1] if match else "0" for match in numbers})


def _preferred(name: str) -> tuple[int, bool, str]:
    stem = re.sub(r"(_\d+)?\..*", "", name)
    return ORDER.index(stem), name.endswith(".json"), name


def _indexed(index: Path) -> list[Path]:
    """The shards that an index names."""
    with understood(index):
        names = sorted({str(name) for name in json_text.mapping(index)["weight_map"].values()})
    for name in names:
        if Path(name).name != name or not disk.is_file(index.parent / name):
            raise SurgeryError(
                f"{index} names {name}, which is not there",
                next=command("doctor", why="which step is whole"),
            )
    return [index.parent / name for name in names]
