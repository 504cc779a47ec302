"""The x axis of a TensorBoard tag: what the `step` of its events counts, by the tag's name."""

from __future__ import annotations

import re
from collections.abc import Mapping

ITERATION, SAMPLES, TOKENS, GIGAFLOS = "iteration", "samples", "tokens", "gigaflos"
TRAINING = (ITERATION, SAMPLES, TOKENS, GIGAFLOS)
"""Axes that grow with training, in the order in which one is preferred as the clock."""

LOOSE = "loose"
"""Text, hparams and layouts: an iteration or 0, and no measure of how far a writer came."""
POSITION = "position"
"""No x to go by: the event belongs to its neighbours in the file."""

_VERSUS = re.compile(r"(?P<of>.+) vs (?P<axis>samples|tokens|gigaflo\w*)(?: .*)?", re.DOTALL)
_X = re.compile(r".*,x=(?P<axis>samples|tokens|gigaflo\w*)", re.DOTALL)

_SECONDS = re.compile(r"Train/mean_(?:reward|episode_length)/time")
"""What rsl_rl logs once more, over the seconds of its launch."""


def axis(tag: str, overrides: Mapping[str, str]) -> str:
    """One of the words above. Source: the tags that Megatron, Megatron-DeepSpeed and DeepSpeed's
    monitor log; `overrides` is the user's word and wins."""
    if tag in overrides:
        return overrides[tag]
    match = _VERSUS.fullmatch(tag) or _X.fullmatch(tag)
    if match:
        return GIGAFLOS if match["axis"].startswith("gigaflo") else match["axis"]
    if tag.startswith(("Train/Samples/", "Train/Eigenvalues/")):
        return SAMPLES
    if tag.startswith("_hparams_/") or tag.endswith("/text_summary"):
        return LOOSE
    if tag == "custom_scalars__config__":
        return LOOSE
    # Written at a restart only, for this iteration and the next one.
    if tag.endswith("/world_size"):
        return POSITION
    if _SECONDS.fullmatch(tag):
        return POSITION
    return ITERATION


def partner(tag: str) -> str | None:
    """The tag that logs the same values over iterations: `T` of `T vs samples`."""
    match = _VERSUS.fullmatch(tag)
    return match["of"] if match else None
