"""`trainer_state.json` of Hugging Face's Trainer: its step, its batch size, its best model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.errors import count
from ckptsurgeon.formats.capabilities import Ranks, Rebatches
from ckptsurgeon.formats.fields.values import Place, Setting
from ckptsurgeon.formats.huggingface import batch
from ckptsurgeon.formats.places.json_beside import JsonBeside

BEST = ("best_model_checkpoint", "best_metric", "best_global_step")
"""What the Trainer keeps of the best model: its folder, the metric, the step."""


@dataclass
class TrainerState(JsonBeside, Ranks, Rebatches):
    """A step of the Trainer has the file among its `texts`; one of Accelerate's scripts has none,
    and keeps none of it."""

    def in_state(self, field: str) -> list[Place]:
        """The Trainer's step, or the batch size of one process."""
        if field == "batch_size":
            return batch.places(self)
        return [place for file in self.texts for place in self.at(file, ("global_step",))]

    def recount(self, counter: str, value: int) -> tuple[list[Setting], list[str]]:
        """The Trainer passes over the batches of so many updates when it resumes."""
        settings, notes = super().recount(counter, value)
        passed = _passed_over(settings, value) if counter == "iteration" else ()
        return settings, [*notes, *passed]

    def rebatch(
        self, size: int | None, ramp: Sequence[int] | None, own_config: bool
    ) -> tuple[list[Setting], list[str]]:
        """See `batch`."""
        return batch.rebatch(self, size, ramp)

    def forget(
        self, gone: Collection[Path], resumed: Sequence[Path]
    ) -> tuple[list[Setting], list[str]]:
        """The best model so far, where its folder is not in the run: its metric would rank for ever
        against steps that are saved from here on (`_determine_best_metric`)."""
        run = self.path.parent
        settings, notes = [], []
        for file in self.texts:
            best = self.value(file, (BEST[0],))
            if not isinstance(best, str) or _is_in(run, Path(best).name, gone):
                continue
            places = [place for key in BEST for place in self.at(file, (key,))]
            settings += [Setting(str(p.path[0]), p, None) for p in places if p.value is not None]
            notes.append(
                f"{file.parent.name}/{file.name} no longer names {Path(best).name} as the best "
                "model so far: it is not in the run"
            )
        return settings, notes


def _passed_over(settings: list[Setting], step: int) -> Iterator[str]:
    """What else the Trainer does with a new global_step."""
    if settings:
        yield (
            f"the data moves with it: a resume skips the batches of {count(step, 'update')}, "
            "unless --ignore_data_skip was given; the schedule stays where it is"
        )


def _is_in(run: Path, name: str, gone: Collection[Path]) -> bool:
    return disk.is_folder(run / name) and run / name not in gone
