"""Checkpoints that real DeepSpeed engines write, and what such an engine uses after loading one.

With one rank in the test's own process; with two as `python -m tests.support.deepspeed_engine`.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.support.engine_models import model_of
from tests.support.in_process import one_rank
from tests.support.launch import run_module
from tests.support.new_numbers import MOMENTS, State

PEAK = 1e-3


@dataclass(frozen=True)
class Options:
    """How an engine is built. `optimizer`: adamw, cpu_adam, adamw8bit, config,
    torch.NAME, or fused and apex (fused_adam.py); `scheduler`:
    a key of SCHEDULERS, or a section of the DeepSpeed config."""

    stage: int = 1
    dtype: str = "fp32"
    optimizer: str = "adamw"
    scheduler: str | None = None
    scheduler_config: Mapping[str, Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    zero: Mapping[str, Any] = field(default_factory=dict)
    model: str = "dense"
    lr: float = PEAK


def schedulers() -> dict[str, Callable[[Any], Any]]:
    """Every scheduler of torch whose state the surgeon edits, over the same 20 steps."""
    from torch.optim import lr_scheduler as torch_lr

    def sequential(optimizer: Any) -> Any:
        parts = [
            torch_lr.LinearLR(optimizer, 0.25, total_iters=3),
            torch_lr.CosineAnnealingLR(optimizer, 17, 1e-5),
        ]
        return torch_lr.SequentialLR(optimizer, parts, [3])

    return {
        "LambdaLR": lambda o: torch_lr.LambdaLR(o, lambda t: min(1.0, (t + 1) / 3) * 0.9**t),
        "CosineAnnealingLR": lambda o: torch_lr.CosineAnnealingLR(o, 20, 1e-5),
        "CosineAnnealingWarmRestarts": lambda o: torch_lr.CosineAnnealingWarmRestarts(o, 9),
        "OneCycleLR": lambda o: torch_lr.OneCycleLR(o, PEAK, total_steps=20),
        "OneCycleLR-linear": lambda o: torch_lr.OneCycleLR(
            o, PEAK, total_steps=20, anneal_strategy="linear", three_phase=True
        ),
        "StepLR": lambda o: torch_lr.StepLR(o, 5),
        "MultiStepLR": lambda o: torch_lr.MultiStepLR(o, [3, 5]),
        "ExponentialLR": lambda o: torch_lr.ExponentialLR(o, 0.9),
        "ConstantLR": lambda o: torch_lr.ConstantLR(o, 0.5, 5),
        "LinearLR": lambda o: torch_lr.LinearLR(o, 0.5, total_iters=6),
        "PolynomialLR": lambda o: torch_lr.PolynomialLR(o, 20),
        "SequentialLR": sequential,
    }


def _groups(model: Any, options: Options) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim >= 2]
    vectors = [p for p in trained if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.1, "name": "matrices"},
        {"params": vectors, "weight_decay": 0.0, "name": "vectors"},
    ]
    if options.model.startswith("moe"):
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        return list(split_params_into_different_moe_groups_for_optimizer(groups))
    return groups


def _optimizer(model: Any, options: Options) -> Any:
    import torch

    groups = _groups(model, options)
    settings: dict[str, Any] = {"lr": options.lr, "betas": (0.9, 0.95), "eps": 1e-8}
    if options.optimizer.startswith("torch."):
        more = {"momentum": 0.9} if options.optimizer in ("torch.SGD", "torch.RMSprop") else {}
        cls: Any = getattr(torch.optim, options.optimizer.removeprefix("torch."))
        return cls(groups, lr=options.lr, **more)
    if options.optimizer == "cpu_adam":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, **settings)
    if options.optimizer == "fused":
        from tests.support.fused_adam import fused_adam

        return fused_adam(groups, **settings)
    if options.optimizer == "apex":
        from tests.support.fused_adam import ApexAdam

        return ApexAdam(groups, **settings)
    if options.optimizer == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(groups, **settings)
    return torch.optim.AdamW(groups, **settings)


def build(options: Options) -> Any:
    """A fresh engine."""
    import deepspeed

    take_any_dtype()
    model = model_of(options.model)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        # By default each engine reserves buckets of 500 M elements: a process of many can't fork.
        "zero_optimization": {
            "stage": options.stage,
            "reduce_bucket_size": 1_000_000,
            "stage3_prefetch_bucket_size": 1_000_000,
            **options.zero,
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        **options.config,
    }
    if options.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if options.dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8, "hysteresis": 2}
    if options.scheduler_config is not None:
        config["scheduler"] = dict(options.scheduler_config)
    made = None
    if options.scheduler == "WarmupLR":
        from deepspeed.runtime.lr_schedules import WarmupLR

        made = WarmupLR
    elif options.scheduler:
        made = schedulers()[options.scheduler]
    named = options.optimizer == "config"
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters() if named else None,
        optimizer=None if named else _optimizer(model, options),
        lr_scheduler=made,
        config=config,
    )
    return engine


def take_any_dtype() -> None:
    """Let DeepSpeed train in fp16 on a CPU, and in bf16 without its reports of memory."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime import bf16_optimizer

    # DeepSpeed asks for fast fp16 kernels of the CPU; slow ones are as right.
    get_accelerator().is_fp16_supported = lambda: True
    bf16_optimizer.see_memory_usage = lambda *rest, **more: None  # seconds for each line of it


def live(engine: Any) -> Any:
    """The optimizer whose step() moves the weights."""
    inner = engine.optimizer
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    return inner


def train(engine: Any, steps: int, losses: list[float] | None = None) -> list[list[float]]:
    """The rates that each of `steps` updates used, by param group; their losses go to `losses`."""
    import torch

    rates: list[list[float]] = []
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(_dtype(engine), torch.float32)
    rank = int(os.environ.get("RANK", "0"))
    for _ in range(steps):
        torch.manual_seed(engine.global_steps * 100 + rank)
        x = torch.randn(2, 8).to(dtype)
        loss = engine(x).float().pow(2).mean()
        engine.backward(loss)
        rates.append([float(group["lr"]) for group in live(engine).param_groups])
        engine.step()
        if losses is not None:
            losses.append(float(loss.detach()))
    return rates


def _dtype(engine: Any) -> str:
    if engine.bfloat16_enabled():
        return "bf16"
    return "fp16" if engine.fp16_enabled() else "fp32"


def client(step: int) -> dict[str, Any]:
    """The client state of a trainer like Megatron's: counters and args."""
    args = Namespace(consumed_train_samples=step * 2, seed=1234, clip_grad=1.0)
    return {"iteration": step, "args": args}


def make(root: Path, options: Options, steps: int = 6) -> None:
    """Train `steps` and save `global_step<steps>`."""
    engine = build(options)
    train(engine, steps)
    engine.save_checkpoint(str(root), client_state=client(steps))


def resume(root: Path, options: Options, steps: int = 3) -> dict[str, Any]:
    """What a new engine holds after it has loaded `latest`, and the rates and losses of its next
    updates."""
    engine = build(options)
    loaded, state = engine.load_checkpoint(str(root))
    assert loaded is not None
    held = effective(engine)
    held["consumed_samples"] = state["args"].consumed_train_samples if "args" in state else None
    held["losses"] = []
    held["rates"] = train(engine, steps, held["losses"])
    return held


def effective(engine: Any) -> dict[str, Any]:
    """What the live optimizer will use: groups, steps, size of the moments, loss scale, clip."""
    inner = live(engine)
    steps, moments = set(), {"exp_avg": 0.0, "exp_avg_sq": 0.0}
    for state in inner.state.values():
        if "step" in state:
            steps.add(int(state["step"]))
        for name in moments:
            if name in state:
                moments[name] += float(state[name].float().abs().sum())
    outer = engine.optimizer
    scaler = getattr(outer, "loss_scale_config", None) or getattr(outer, "loss_scaler", None)
    scale = getattr(scaler, "cur_scale", None)
    return {
        "step": engine.global_steps,
        "lr": [float(group["lr"]) for group in inner.param_groups],
        "betas": [list(group["betas"]) for group in inner.param_groups],
        "eps": [group["eps"] for group in inner.param_groups],
        "weight_decay": [group["weight_decay"] for group in inner.param_groups],
        "group_step": [group.get("step") for group in inner.param_groups],
        "steps": sorted(steps),
        "moments": moments,
        "loss_scale": None if scale is None else float(scale),
        "clip_grad": getattr(outer, "clip_grad", None),
    }


def gathered(root: Path, options: Options, step: int) -> State:
    """What a new engine holds of each parameter after a load, by DeepSpeed's own functions."""
    return _whole(_loaded(root, options, step))


def _loaded(root: Path, options: Options, step: int) -> Any:
    engine = build(options)
    tag = f"global_step{step}{'_universal' if engine.load_universal_checkpoint() else ''}"
    assert engine.load_checkpoint(str(root), tag)[0] is not None
    return engine


def _whole(engine: Any) -> State:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if not engine.load_universal_checkpoint() and engine.zero_optimization_stage() in (1, 2):
        engine.optimizer._lazy_init_hp_params_optimizer_state()  # else only an update finds them
    held: State = {}
    for name, parameter in engine.module.named_parameters():
        kept = {key: safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}
        kept["param"] = safe_get_full_fp32_param(parameter)
        with deepspeed.zero.GatheredParameters([parameter]):
            held[name] = {"weights": parameter.detach().clone()}
        held[name] |= {key: tensor.clone() for key, tensor in kept.items()}
    return held


@contextmanager
def process_group() -> Iterator[None]:
    """This process alone as DeepSpeed's world."""
    with one_rank():
        yield


# --- two ranks -----------------------------------------------------------------------------------


def launched(
    what: str, root: Path, options: Options, ranks: int = 2, steps: int = 6
) -> list[dict[str, Any]]:
    """`make` or `resume` on several ranks, with so many updates; what each rank holds, in rank
    order. `gathered` loads step `steps`, makes two updates, and leaves in `held.pt` beside the run
    what the engines together had of each parameter before."""
    words = (what, root, json.dumps(asdict(options)), steps)
    done = run_module("tests.support.deepspeed_engine", *words, ranks=ranks)
    lines = [line for line in done.stdout.splitlines() if line.startswith("HELD: ")]
    return list(json.loads(lines[0][6:])) if lines else []


def main() -> None:
    from train import distributed

    what, root, options = sys.argv[1], Path(sys.argv[2]), Options(**json.loads(sys.argv[3]))
    distributed.start(1)
    if what == "make":
        make(root, options, int(sys.argv[4]))
    else:
        held = distributed.gather(_of_rank(what, root, options, int(sys.argv[4])))
        if distributed.rank() == 0:  # two ranks' lines would be mixed
            print(f"\nHELD: {json.dumps(held)}", flush=True)
    distributed.finish()


def _of_rank(what: str, root: Path, options: Options, steps: int) -> dict[str, Any]:
    if what == "resume":
        return resume(root, options, steps)
    import torch

    engine = _loaded(root, options, steps)
    held, losses = effective(engine), list[float]()
    state = _whole(engine)
    if os.environ["RANK"] == "0":
        torch.save(state, root.with_name("held.pt"))
    train(engine, 2, losses)
    return {**held, "losses": losses}


if __name__ == "__main__":
    main()
