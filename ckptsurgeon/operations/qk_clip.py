"""QK-clip by the weights alone: which heads are scaled, and by how much.

Source: Kimi K2 2507.20534, section 2.1: where the largest logit S of a head is above the threshold,
its queries and keys take the root of threshold / S each; what heads share stays as it is, and the
queries take all of it. Kimi measures S while it trains. A checkpoint has no inputs: here S is
`sigmas` times the root mean square of the head's logits for isotropic inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, NamedTuple

from ckptsurgeon.errors import SurgeryError, count
from ckptsurgeon.files.expressions import matching
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.formats.capabilities import HasHeads
from ckptsurgeon.formats.heads.heads import Rows
from ckptsurgeon.formats.tensors.logits import SIGMAS, Logits, logits
from ckptsurgeon.formats.tensors.stretches import Kinds, Parameter
from ckptsurgeon.hints import command
from ckptsurgeon.operations.fields import Fields
from ckptsurgeon.operations.key import Key
from ckptsurgeon.operations.limits import Limits
from ckptsurgeon.plans.frozen import held

SLACK = 1e-3
"""A share by which rounding leaves a scaled head above the threshold: it is not scaled again."""


@held
class QkClip(Fields):
    """Heads whose largest logit is estimated above `threshold`, as `sigmas` times its root mean
    square by the weights."""

    key: ClassVar[str] = "scale.qk_clip"

    threshold: Annotated[
        float,
        Key(
            "in place of `by`: queries and keys of the heads whose largest attention logit is "
            "estimated above it ([below](#qk-clip-from-the-weights-alone))",
            limits=Limits(above=0),
        ),
    ]
    sigmas: Annotated[
        float,
        Key(
            "how many times the root mean square of its logits a head's largest one is taken to "
            "be; 5 if not given",
            limits=Limits(above=0),
        ),
    ] = SIGMAS

    def estimate(self, head: Logits) -> float:
        """The largest logit that a head is taken to have."""
        return self.sigmas * head.rms


class Scaled(NamedTuple):
    """Rows, or entries of a bias, and the factor that they take."""

    rows: Rows
    by: float


def scaled(
    checkpoint: Checkpoint, known: Mapping[Parameter, Kinds], clip: QkClip, params: str
) -> tuple[list[Scaled], list[Logits]]:
    """What of each head above the threshold takes which factor, and those heads. `params` narrows
    it to weights whose names match. Raises SurgeryError where not every head is known."""
    layers, apart = HasHeads.of(checkpoint).attention()
    if apart:
        raise SurgeryError(
            f"the queries and keys of {checkpoint.path.name} are not all known: {apart[0]}",
            next=command(
                "scale", "REGEX", "--by", "F", why="whole parameters, by a factor of your own"
            ),
        )
    names = matching(params, (layer.queries for layer in layers), "scale.params", "query weight")
    chosen = [layer for layer in layers if layer.queries in names]
    out: list[Scaled] = []
    heads: dict[tuple[str, int], Logits] = {}
    every = [copy for layer in chosen for copy in (layer, *layer.also)]
    places = ((layer, head) for layer in every for head in layer.heads)
    for (layer, head), found in zip(places, logits(checkpoint, known, every), strict=True):
        largest = clip.estimate(found)
        if not math.isfinite(largest):
            raise SurgeryError(
                f"{found.layer}: head {found.head} has weights that are NaN or infinite",
                next=command("verify", "--level", "4"),
            )
        if largest <= clip.threshold * (1 + SLACK):
            continue
        heads.setdefault((found.layer, found.head), found)  # once of files that repeat it
        left = clip.threshold / largest
        both = math.sqrt(left)
        sides = [(head.query, left if layer.shared else both)]
        sides.append((head.query_bias, sides[0][1]))
        if not layer.shared:
            sides += [(head.key, both), (head.key_bias, both)]
        for rows, by in sides:
            out += [Scaled(each, by) for each in rows]
    return out, list(heads.values())


def named(heads: list[Logits], clip: QkClip) -> Iterator[str]:
    """The heads that are scaled, the largest first: three of them, and how many others."""
    for head in sorted(heads, key=lambda item: -item.rms)[:3]:
        yield f"{head.layer} head {head.head} ({clip.estimate(head):.3g})"
    if len(heads) > 3:
        yield f"and {count(len(heads) - 3, 'other')}"
