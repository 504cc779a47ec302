"""Of a trainer with this folder in PYTHONPATH: the weights are NaN from iteration $NAN_AT on, after
each start or, where $NAN_ONCE names a file, only after the first."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

MODULES = ("train.batch", "ckptsurgeon_train.batch")


class Faulty(importlib.abc.MetaPathFinder):
    """Puts the fault into the module that trains on one batch, when it is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in MODULES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            _break(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _break(module: Any) -> None:
    whole = module.run_batch

    def run_batch(training: Any, size: int) -> Any:
        once = os.environ.get("NAN_ONCE")
        due = training.progress.iteration + 1 >= int(os.environ["NAN_AT"])
        if due and not (once and Path(once).exists()):
            if once:
                Path(once).touch()
            for parameter in training.engine.module.parameters():
                parameter.data.fill_(float("nan"))
        return whole(training, size)

    module.run_batch = run_batch


if "NAN_AT" in os.environ:
    sys.meta_path.insert(0, Faulty())
