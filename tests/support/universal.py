"""Universal copies, made by DeepSpeed's own converter."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path


def convert(root: Path, step: int = 6) -> Path:
    from deepspeed.checkpoint import ds_to_universal

    copy = root / f"global_step{step}_universal"
    ds_to_universal.main(
        Namespace(
            input_folder=str(root / f"global_step{step}"), output_folder=str(copy),
            num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True,
            inject_missing_state=True,
        )
    )  # fmt: skip
    return copy
