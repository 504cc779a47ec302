"""Small runs of the trainers of `recipes/history`, each saved at the step and with the counters of
the row that it stands for, and what a restart of it holds.

Engines and optimizers are made once; a run is what they save after their counters were set."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ckptsurgeon.plans.promise import Promise
from tests.support import deepspeed_engine, fairseq_files, megatron_engine, training_log

RAMP = (16, 16, 6_000_000)
"""`--rampup-batch-size` of BigScience's 104B."""


def consumed(iterations: int, batch: int, ramp: tuple[int, int, int] | None) -> int:
    """Samples after so many iterations, as Megatron's calculator counts them."""
    at = 0
    for _ in range(iterations):
        size = batch
        if ramp is not None and at <= ramp[2]:
            start, more, samples = ramp
            size = start + int(at / (samples / ((batch - start) // more))) * more
        at += size
    return at


# --- Megatron-DeepSpeed: BigScience, GLM ---------------------------------------------------------


@dataclass(frozen=True)
class Megatron:
    """A run of a pipeline with AnnealingLR: tr8b-104B, if nothing else is said."""

    steps: Sequence[int]
    lr: float = 6e-5
    min_lr: float = 6e-6
    warmup: int = 216_320
    decay: int = 126_953_125
    beta2: float = 0.95
    batch: int = 2048
    ramp: tuple[int, int, int] | None = RAMP
    logs: bool = False
    drifted: bool = False

    def make(self, root: Path) -> None:
        """Save every step; one process of a real DeepSpeed writes all files."""
        for step in self.steps:
            self.save(root, step)
        if self.logs:
            job = training_log.Job(
                6001, 7200, training_log.START, interval=30, evaluate=300, consumed=self.samples
            )
            training_log.write(root / "tensorboard", job)
            for step in self.steps:
                for path in (root / f"global_step{step}").iterdir():
                    os.utime(path, (job.wall(step) + 5,) * 2)

    def samples(self, iterations: int) -> int:
        """Samples after so many iterations."""
        return consumed(iterations, self.batch, self.ramp)

    def save(self, root: Path, step: int) -> None:
        """One more step, and the pointers to it."""
        engine, args = _pipeline()
        at = self.samples(step)
        args.iteration, args.consumed_train_samples = step, at
        args.consumed_train_tokens = 2048 * at
        args.gigaflos_no_embeds = training_log.gigaflos(at) if self.logs else 0.0
        args.global_batch_size = self.batch
        args.rampup_batch_size = None if self.ramp is None else [str(n) for n in self.ramp]
        args.lr, args.min_lr, args.lr_warmup_samples = self.lr, self.min_lr, self.warmup
        args.lr_decay_samples, args.adam_beta2 = self.decay, self.beta2
        engine.global_steps, engine.global_samples = step, at
        schedule = engine.lr_scheduler
        schedule.max_lr, schedule.min_lr = self.lr, self.min_lr
        schedule.warmup_steps, schedule.decay_steps = self.warmup, self.decay
        schedule.num_steps = 0
        for group in engine.optimizer.optimizer.param_groups:
            group |= {"betas": (0.9, self.beta2), "step": step}
        schedule.step(at)
        megatron_engine.save(root, engine, args)
        (root / "latest_checkpointed_iteration.txt").write_text(str(step))
        if self.drifted:
            _second_tensor_rank(root / f"global_step{step}")

    def check(self, root: Path, promise: Promise) -> None:
        """A new engine holds what was promised."""
        if self.drifted:
            return _equal_norms(root / f"global_step{self.steps[-1]}")
        held = megatron_engine.resume(root, 1, use_checkpoint_lr_scheduler=True)
        assert (held["iteration"], held["consumed_samples"]) == (
            promise.step - 1,
            promise.consumed_samples,
        )
        assert held["rates"] == [promise.lr]
        assert held["betas"] == {promise.betas} and held["eps"] == {promise.eps}
        assert held["steps"] == {promise.adam_step}
        assert (held["moments"] == 0) == (promise.adam_step == 0)
        assert held["clip_grad"] == promise.clip_grad
        assert set(held["weight_decay"]) == set(promise.weight_decay or ())


@cache
def _pipeline() -> tuple[Any, Any]:
    args = megatron_engine.arguments()
    engine = megatron_engine.build(args)
    megatron_engine.train(engine, args, 1)
    return engine, args


def _second_tensor_rank(folder: Path) -> None:
    """Files of another tensor rank, whose layer norm is not that of the first one: neither its
    weights nor their masters and moments."""
    for path in list(folder.iterdir()):
        held = torch.load(path, weights_only=False)
        if "mp_world_size" in held:
            held |= {"mp_world_size": 2, "checkpoint_parallel_dimensions": {"tp_degree": 2}}
            held["args"].tensor_model_parallel_size = 2
            torch.save(held, path)
        for tensor in _norms(path, held):
            tensor += 0.25
        torch.save(held, folder / _of_second(path))


def _of_second(path: Path) -> str:
    return path.name.replace("-model_00-", "-model_01-").replace("mp_rank_00", "mp_rank_01")


def _norms(path: Path, held: dict[str, Any]) -> list[torch.Tensor]:
    """Every copy of the layer norm's weight and bias in a file."""
    if path.name.startswith("layer_01"):
        return [weight.data for weight in held.values()]
    if "optim_states" not in path.name:
        return []
    state, found = held["optimizer_state_dict"], []
    for i, mapping in enumerate(state["param_slice_mappings"]):
        flats = [state["single_partition_of_fp32_groups"][i]]
        flats += [state["base_optimizer_state"]["state"][i][n] for n in ("exp_avg", "exp_avg_sq")]
        for name, part in mapping.items():
            if name.startswith("1."):
                found += [flat.data[part.start : part.start + part.numel] for flat in flats]
    return found


def _equal_norms(folder: Path) -> None:
    """In weights, masters and moments."""
    compared = 0
    for path in folder.glob("*_00*"):
        if _of_second(path) == path.name:
            continue
        files = (path, folder / _of_second(path))
        first, second = (_norms(file, torch.load(file, weights_only=False)) for file in files)
        for one, other in zip(first, second, strict=True):
            assert torch.equal(one, other)
            compared += 1
    assert compared == 2 + 2 * 3


# --- Accelerate: IDEFICS -------------------------------------------------------------------------


@dataclass(frozen=True)
class Idefics:
    """`opt_step-<N>/accelerator_state` with a DeepSpeed engine and, as a state that the script
    registered, a LambdaLR. `position`: where that stands, if not at the step."""

    steps: Sequence[int]
    lr: float = 3.75e-5
    position: int | None = None

    def make(self, root: Path) -> None:
        """Save every step as Accelerate does: its own files are two."""
        engine, schedule = _idefics()
        for step in self.steps:
            at = step if self.position is None else self.position
            rates = [self.lr * share(at) for _ in schedule.base_lrs]
            schedule.base_lrs = [self.lr for _ in rates]
            schedule.last_epoch, schedule._step_count, schedule._last_lr = at, at + 1, rates
            for group, rate in zip(engine.optimizer.param_groups, rates, strict=True):
                group |= {"lr": rate, "initial_lr": self.lr}
            for state in deepspeed_engine.live(engine).state.values():
                state["step"] = torch.tensor(float(step))
            engine.global_steps, engine.global_samples = step, 2 * step
            folder = root / f"opt_step-{step}" / "accelerator_state"
            engine.save_checkpoint(str(folder), tag="pytorch_model")
            torch.save(schedule.state_dict(), folder / "custom_checkpoint_0.pkl")
            torch.save({"step": step}, folder / "random_states_0.pkl")

    def check(self, root: Path, promise: Promise) -> None:
        """A new engine's next rate is the promised one, the one after it the schedule's."""
        engine, schedule = _idefics.__wrapped__(0)
        step = promise.step - 1
        folder = root / f"opt_step-{step}" / "accelerator_state"
        engine.load_checkpoint(str(folder), tag="pytorch_model")
        schedule.load_state_dict(torch.load(folder / "custom_checkpoint_0.pkl"))
        held = deepspeed_engine.effective(engine)
        assert (held["step"], held["steps"]) == (step, [promise.adam_step])
        assert (schedule.last_epoch, schedule._step_count) == (step, step + 1)
        assert set(schedule.get_last_lr()) == {promise.lr}
        (base,) = set(schedule.base_lrs)
        (first,) = deepspeed_engine.train(engine, 1)
        schedule.step()
        (second,) = deepspeed_engine.train(engine, 1)
        assert set(first) == {promise.lr} and set(second) == {base * share(step + 1)}


def share(step: int) -> float:
    """Of the peak: a warm-up, then a decay to 0.944 at 30,500, which lies between the base_lrs and
    the _last_lr of the chronicle."""
    return min(1.0, step / 2000) * (1 - 0.056 * step / 30_500)


@cache
def _idefics(steps: int = 1) -> tuple[Any, Any]:
    engine = deepspeed_engine.build(deepspeed_engine.Options(stage=1))
    schedule = torch.optim.lr_scheduler.LambdaLR(engine.optimizer.optimizer, share)
    deepspeed_engine.train(engine, steps)
    return engine, schedule


# --- metaseq: OPT --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metaseq:
    """Four shards, three steps, and copies of the last; `groups`: what their param groups hold."""

    original: Path
    groups: Mapping[str, Any] = field(default_factory=dict)

    def make(self, root: Path) -> None:
        """Copy the run that was made once."""
        if not self.original.exists():
            fairseq_files.make_run(self.original)
        shutil.copytree(self.original, root)
        for path in root.glob("checkpoint_*.pt") if self.groups else ():
            document = torch.load(path, weights_only=False)
            document["last_optimizer_state"]["param_groups"][0] |= self.groups
            torch.save(document, path)
        for suffix in fairseq_files.NAMES if self.groups else ():
            shutil.copyfile(
                root / f"checkpoint_30{suffix}.pt", root / f"checkpoint_last{suffix}.pt"
            )

    def check(self, root: Path, promise: Promise) -> None:
        """A restart of every shard loads what was promised, its rate that of the flags."""
        for suffix in fairseq_files.NAMES:
            adam, document = fairseq_files.resumed(root / f"checkpoint_last{suffix}.pt")
            (group,), states = adam.param_groups, adam.state.values()
            assert (group["betas"], group["eps"]) == (promise.betas, promise.eps)
            assert (group["weight_decay"],) == promise.weight_decay
            assert group["lr"] == promise.lr
            assert {int(state["step"]) for state in states} == {promise.adam_step}
            assert document["last_optimizer_state"]["loss_scale"] == promise.loss_scale
            moved = [bool(state["exp_avg"].any()) for state in states]
            assert moved == [promise.adam_step != 0] * len(fairseq_files.PIECES)
