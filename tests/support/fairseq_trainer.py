"""Runs of fairseq's own command line: a transformer_lm of one layer on CPUs, over gloo where there
are several ranks. As a program it takes the flags of fairseq-train, and prints what each update
used."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch

from tests.support import fairscale_cpu
from tests.support.newest_megatron import beside

FOLDER = beside("fairseq")


def _hashable(made: Any) -> Any:
    """`dataclass`, whose instances have a hash: since Python 3.11 others can't be the defaults of
    fields, and those of hydra 1.0 and of fairseq are."""

    def dataclass(cls: Any = None, /, **options: Any) -> Any:
        if cls is None:
            return lambda cls: dataclass(cls, **options)
        return made(cls, **{"unsafe_hash": "__hash__" not in vars(cls), **options})

    return dataclass


def put_first(folder: Path) -> None:
    """Import fairseq and the older omegaconf that it wants from there. It scores no translation."""
    for name in [*sys.modules]:
        if name.partition(".")[0] == "omegaconf":
            del sys.modules[name]
    sys.path.insert(0, str(folder))
    sys.modules["sacrebleu"] = types.ModuleType("sacrebleu")
    vars(sys.modules["sacrebleu"])["__version__"] = "1"


put_first(FOLDER)
_own = dataclasses.dataclass
dataclasses.dataclass = _hashable(_own)

from fairseq.data import Dictionary, FairseqDataset  # noqa: E402
from fairseq.tasks import register_task  # noqa: E402
from fairseq.tasks.language_modeling import (  # noqa: E402
    LanguageModelingConfig,
    LanguageModelingTask,
)
from fairseq.trainer import Trainer  # noqa: E402
from fairseq_cli import train  # noqa: E402

dataclasses.dataclass = _own
ROWS, LENGTH, WORDS = 32, 8, 28
SEEN: dict[int, dict[str, Any]] = {}
"""Number of an update → what it used."""


class Rows(FairseqDataset):  # type: ignore[misc]
    """Random words, each to be predicted from those before it."""

    def __init__(self, first: int, end: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randint(first, end, (ROWS, LENGTH + 1), generator=generator)

    def __getitem__(self, index: int) -> int:
        return int(index)

    def __len__(self) -> int:
        return ROWS

    def collater(self, samples: list[int]) -> dict[str, Any]:
        rows = self.rows[samples]
        words, count = rows[:, :-1], len(samples)
        return {
            "id": torch.tensor(samples),
            "nsentences": count,
            "ntokens": words.numel(),
            "net_input": {"src_tokens": words, "src_lengths": torch.full((count,), LENGTH)},
            "target": rows[:, 1:].contiguous(),
        }

    def num_tokens(self, index: int) -> int:
        return LENGTH

    size = num_tokens

    def filter_indices_by_size(self, indices: Any, max_sizes: Any) -> tuple[Any, list[int]]:
        return indices, []

    def batch_by_size(self, indices: Any, *_: Any, **options: Any) -> list[list[int]]:
        """Its own is compiled."""
        size = options["max_sentences"]
        return [indices[at : at + size].tolist() for at in range(0, len(indices), size)]


@register_task("rows", dataclass=LanguageModelingConfig)
class RowsTask(LanguageModelingTask):  # type: ignore[misc]
    @classmethod
    def setup_dictionary(cls, args: Any, **_: Any) -> tuple[Any, Any]:
        dictionary = Dictionary()
        for word in range(WORDS):
            dictionary.add_symbol(f"word{word}")
        return dictionary, dictionary

    def load_dataset(self, split: str, **_: Any) -> None:
        self.datasets[split] = Rows(self.dictionary.nspecial, len(self.dictionary))


class Watched(Trainer):  # type: ignore[misc]
    def train_step(self, samples: Any, raise_oom: bool = False) -> Any:
        SEEN[self.get_num_updates() + 1] = self._used(samples)
        return super().train_step(samples, raise_oom)

    def _used(self, samples: Any) -> dict[str, Any]:
        adam, scaler = self.optimizer.optimizer, getattr(self.optimizer, "scaler", None)
        parameters = [p for group in adam.param_groups for p in group["params"]]
        states = [state for p in parameters if "exp_avg" in (state := adam.state.get(p, {}))]
        return {
            **{key: [group.get(key) for group in adam.param_groups]
               for key in ("lr", "betas", "eps", "weight_decay")},
            "adam_step": max((int(state["step"]) for state in states), default=0),
            "moments": sum(float(state["exp_avg"].abs().sum()) for state in states),
            "loss_scale": 1.0 if scaler is None else scaler.loss_scale,
            "clip": self.cfg.optimization.clip_norm,
            "seed": self.cfg.common.seed,
            "batch": [sample["id"].tolist() for sample in samples],
            "sums": {name: float(parameter.detach().double().sum())
                     for name, parameter in self.get_model().named_parameters()},
        }  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    if "fully_sharded" in sys.argv:
        fairscale_cpu.on_cpus()
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # it was written before that was a default
    train.Trainer = Watched
    train.cli_main()
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps(SEEN), flush=True)


if __name__ == "__main__":
    main()
