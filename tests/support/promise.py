"""A promise made by hand, for tests that need any."""

from __future__ import annotations

from ckptsurgeon.plans.promise import Promise

PROMISE = Promise(
    step=6211,
    lr=2.685e-05,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=(0.1, 0.0),
    adam_step=6210,
    loss_scale=2048.0,
    clip_grad=1.0,
    consumed_samples=12_718_080,
    skip=((6900, 7010),),
    seed=43,
)
