"""How large attention logits are by the weights alone, for inputs that the norm makes of noise.

Of an input x with |x|² = d, as a norm leaves it, gain g and bias β: q = W_q(g x + β) + b. With
isotropic x the second moments of q are M = W g² Wᵀ + c cᵀ, c = W β + b, and the root mean square
of a logit q·k / √w is √(tr(M_q M_k) / w). No logit of such inputs is above the bound, which takes
the worst two. Both are of equal positions: a rotary embedding turns one against the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.heads.heads import Attention, Head, Rows
from ckptsurgeon.formats.tensors.stretches import Kinds, Parameter, numbers

SIGMAS = 5.0
"""Times its root mean square that a head's largest logit is taken to be: of a million logits of a
bell curve the largest is about 4.9 sigma. Trained heads have longer tails."""
Affine: TypeAlias = tuple[Any, Any]
"""A matrix and a constant."""


class Logits(NamedTuple):
    """Of one head: the root mean square of its logits, and what none can exceed."""

    layer: str
    head: int
    rms: float
    bound: float


def logits(
    checkpoint: Checkpoint, known: Mapping[Parameter, Kinds], layers: list[Attention]
) -> Iterator[Logits]:
    """Of every head of these layers, in order; a head's query and key are in memory at once.
    `known` are the parts of the checkpoint. Raises SurgeryError for weights that can't be read."""
    for layer in layers:
        side = _Side(checkpoint, known, layer)
        made: dict[tuple[Rows, ...], Affine] = {}
        for head in layer.heads:
            if head.key not in made:  # heads of one group have the same
                made = {head.key: side.of(head.key, head.key_bias)}
            yield _of(layer, head, side.of(head.query, head.query_bias), made[head.key])


class _Side:
    """Queries and keys of one layer, as functions of what its norm normalizes."""

    def __init__(
        self, checkpoint: Checkpoint, known: Mapping[Parameter, Kinds], layer: Attention
    ) -> None:
        self.read = partial(numbers, checkpoint, known)
        self.shape = (layer.model.width, layer.model.hidden)
        self.gain = self.read(layer.gain) + layer.model.plus_one
        self.shift = self.read(layer.bias) if layer.bias else 0 * self.gain

    def of(self, weight: tuple[Rows, ...], bias: tuple[Rows, ...]) -> Affine:
        matrix = self.read(weight).reshape(self.shape)
        constant = matrix @ self.shift
        return matrix * self.gain, constant + self.read(bias) if bias else constant


def _of(layer: Attention, head: Head, query: tuple[Any, Any], key: tuple[Any, Any]) -> Logits:
    import numpy

    width, hidden = layer.model.width, layer.model.hidden
    (wq, cq), (wk, ck) = query, key
    gq, gk = wq @ wq.T, wk @ wk.T
    both = float(numpy.sum((gq + numpy.outer(cq, cq)) * (gk + numpy.outer(ck, ck))))
    values, vectors = numpy.linalg.eigh(gq)
    root = vectors * numpy.sqrt(numpy.maximum(values, 0.0))
    largest = math.sqrt(max(float(numpy.linalg.eigvalsh(root.T @ gk @ root)[-1]), 0.0))
    mixed = float(numpy.linalg.norm(wq.T @ ck) + numpy.linalg.norm(wk.T @ cq))
    bound = hidden * largest + math.sqrt(hidden) * mixed + abs(float(cq @ ck))
    return Logits(layer.layer, head.number, math.sqrt(both / width), bound / math.sqrt(width))
