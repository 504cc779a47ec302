"""Random damage to bytes, and a good recipe to begin with."""

from __future__ import annotations

import random

RECIPE = b"""version: 1
why: 'spike: roll back'
rollback: {to: 6}
set: {lr: 3e-4, beta2: 0.95, weight_decay: 0.5x, decay_style: cosine}
reset: [moments, loss_scale]
skip: [6900-7010, 5]
tensorboard: {keep_as: x, rename: {a: b}, axes: {lm loss: samples}}
relaunch: {nproc_per_node: 2, args: [a, b]}
"""
PIECES = [
    b"&a", b"*a", b"!!x ", b"${", b"<<: ", b"\n", b": ", b"- ", b"[", b"{", b"'", b"\t", b"..",
    b"/", b"\0", b"\xff\xff\xff\xff", b"PK\1\2", b"PK\3\4", b"\x7f\xff\xff\xff", b"h\1", b"q\1",
    b"0", b"2", b"R", b"Q", b"s", b"u", b"a", b"e", b"(", b"t", b"}", b"]", b"b", b"\x85", b"\x93",
    b"cos\nsystem\n", b"N", b"I1\n", b"\x8a\xff", b"G\x7f\xf8\0\0\0\0\0\0", b"K\0",
]  # fmt: skip


def mutated(data: bytes, chance: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(out) + 1)
        span = chance.randrange(1, 20)
        act = chance.randrange(7)
        if act == 0 and at < len(out):
            out[at] ^= 1 << chance.randrange(8)
        elif act == 1 and at < len(out):
            out[at] = chance.randrange(256)
        elif act == 2:
            out[at:at] = chance.choice(PIECES)
        elif act == 3:
            piece = chance.choice(PIECES)
            out[at : at + len(piece)] = piece
        elif act == 4:
            del out[at : at + span]
        elif act == 5:
            other = chance.randrange(len(out) + 1)
            out[at:at] = out[other : other + span]
        elif chance.random() < 0.2:
            del out[at:]
    return bytes(out)
