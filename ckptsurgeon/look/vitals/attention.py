"""How large the attention logits of each layer are by its weights alone: its largest head."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.formats.capabilities import HasHeads
from ckptsurgeon.formats.tensors.logits import SIGMAS, Logits, logits
from ckptsurgeon.formats.tensors.stretches import by_parameter
from ckptsurgeon.look.vitals.observations import Observation
from ckptsurgeon.plans.frozen import frozen

CLIPPED = 100.0
"""The largest logit from which on Kimi K2 clips."""


@frozen
class Attention:
    """The head of a layer whose logits have the largest root mean square, for isotropic inputs;
    `bound` is what no input exceeds, `before` what the largest head of the layer had at
    the earlier step."""

    layer: str
    head: int
    heads: int
    rms: float
    bound: float
    before: float | None = None


def attention(
    checkpoint: Checkpoint, before: Checkpoint | None = None
) -> tuple[list[Attention], list[str]]:
    """Of every layer, the largest first, and a sentence on why others are not known. Queries and
    keys are read once more for it, of `before` as well."""
    try:
        found, apart = _largest(checkpoint)
    except SurgeryError as error:
        return [], [f"attention logits: {error.what}"]
    if before is not None:
        try:
            earlier = {item.layer: item for item in _largest(before)[0]}
        except SurgeryError as error:
            earlier = {}
            apart.append(f"at step {before.step}: {error.what}")
        found = [
            replace(item, before=earlier[item.layer].rms) if item.layer in earlier else item
            for item in found
        ]
    return found, [f"attention logits: {text}" for text in apart]


def _largest(checkpoint: Checkpoint) -> tuple[list[Attention], list[str]]:
    """Of each layer, and why others are not known."""
    known, apart = HasHeads.of(checkpoint).attention()
    layers: dict[str, list[Logits]] = {}
    for item in logits(checkpoint, by_parameter(checkpoint.parts()), known):
        layers.setdefault(item.layer, []).append(item)
    out = []
    for layer, heads in layers.items():
        top = max(heads, key=lambda item: item.rms)
        out.append(Attention(layer, top.head, len(heads), top.rms, top.bound))
    return sorted(out, key=lambda item: -item.rms), apart


def observations(found: Iterable[Attention]) -> list[Observation]:
    """Layers whose largest logit is estimated above what Kimi K2 clips at."""
    return [
        Observation(
            item.layer,
            "attention-logits",
            f"head {item.head}: estimated attention logits have RMS {item.rms:.3g}, "
            f"limit {CLIPPED / SIGMAS:g}",
            item.rms * SIGMAS / CLIPPED,
        )
        for item in found
        if item.rms * SIGMAS > CLIPPED
    ]
