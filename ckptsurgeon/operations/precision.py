"""The run goes on in another precision: weights rounded anew from the fp32 masters.

Source: BigScience's chronicles of 104B, which asked for "everything in fp32 from before 4.7K", and
BLOOM, which left fp16 for bf16: a run whose loss scale collapses has no other way on.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.files.dtypes import ITEM_BYTES
from ckptsurgeon.formats import Checkpoint, Part
from ckptsurgeon.formats.capabilities import Converts
from ckptsurgeon.formats.tensors.stretches import by_parameter
from ckptsurgeon.hints import command
from ckptsurgeon.operations.average import Average
from ckptsurgeon.operations.computed_changes import covering, source, with_copies
from ckptsurgeon.operations.key import Key
from ckptsurgeon.operations.own_config import config_changes
from ckptsurgeon.operations.place_changes import of_settings
from ckptsurgeon.operations.scale import Scale
from ckptsurgeon.operations.section import Changes, Recipe, Section
from ckptsurgeon.plans.edits import Change, Computed, NewName, Renamed
from ckptsurgeon.plans.frozen import held
from ckptsurgeon.run.run import Run


@held
class Precision(Section):
    """Weights become their fp32 masters, rounded to nearest even, in the dtype `to`; what only the
    old precision has (a loss scaler) goes, and files get the names that the new one looks for.
    Masters, moments and counters stay."""

    key: ClassVar[str] = "precision"
    computes: ClassVar[bool] = True

    to: Annotated[
        str,
        Key(
            "weights become their fp32 masters, rounded; the loss scaler of fp16 goes, shards get "
            "the names that the new precision looks for; DeepSpeed at ZeRO 1 to 3, with "
            "BF16_Optimizer, experts and a universal copy too",
            "bf16|fp32",
            "The precision to switch to.",
            one_of=("bf16", "fp32"),
        ),
    ]

    def check(self, recipe: Recipe) -> None:
        if self.to == "fp16":
            raise UsageError(
                "the precision can't become fp16: weights may overflow there, and only training "
                "finds its loss scale",
                next=command("precision", "bf16", why="or fp32; in a recipe precision: bf16"),
            )
        for other in (Average, Scale):
            if recipe.get(other) is not None:
                raise UsageError(
                    f"both `precision` and `{other.key}` make new weights",
                    next=f"apply a recipe with `{other.key}` first, and `precision` after it",
                )

    def title(self, run: Run, step: int) -> list[str]:
        return [f"precision {self.to}"]

    def changes(self, run: Run, recipe: Recipe, checkpoint: Checkpoint) -> Changes:
        made = Converts.of(checkpoint).conversion(self.to)
        parameters = by_parameter(checkpoint.parts())
        weights: list[Change] = []
        for name, kinds in parameters.items():
            for part in kinds.get("weights", ()):
                if part.place.value.dtype == made.dtype:
                    continue
                if "master" not in kinds:
                    raise SurgeryError(
                        f"{name[0]} has no fp32 master to round its weights from",
                        next=command("verify", "--level", "3", why="list what contradicts itself"),
                    )
                weights.append(_rounded(run, checkpoint, part, kinds["master"], made.dtype))
        changes = with_copies(run, checkpoint, weights)
        config = config_changes(run, made.config, f"dtype {self.to}")
        if not changes and not made.names and not made.settings:
            return config, []
        changes += of_settings(run, made.settings)
        changes += [
            NewName(run.relative(file), "file name", file.name, Renamed(name))
            for file, name in made.names.items()
        ]
        return [*changes, *config], [made.launch] if made.launch else []


def _rounded(
    run: Run, checkpoint: Checkpoint, part: Part, masters: list[Part], dtype: str
) -> Change:
    terms = tuple(
        source(run, checkpoint, stretch.place, stretch.start, stretch.end)
        for stretch in covering(part, masters)
    )
    size = (part.end - part.start) * ITEM_BYTES[dtype]
    new = Computed("copy", dtype, size, (terms,), label=f"{dtype} of the masters")
    file, field = run.relative(part.place.file), f"weights of {part.parameter}"
    return Change(file, field, str(part.place.value.dtype), new, part.place.path)


# --- commands ------------------------------------------------------------------------------------


def precision(section: Precision) -> Recipe:
    """Switch to bf16 or fp32.

    The weights are rounded from the fp32 masters again, the loss scaler of fp16 is dropped, and the
    shards get the names that the new precision looks for. Masters, moments and counters stay. The
    run's train.yaml follows; for another trainer the plan says what to change in its launch.

    Examples:
    ckptsurgeon precision bf16
    ckptsurgeon precision fp32 --dry-run
    """
    return Recipe(section)


COMMANDS = {"precision": precision}
