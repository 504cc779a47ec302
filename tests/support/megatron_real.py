"""Trains, saves and loads with the real megatron-core on a CPU: `save ROOT …` and `load ROOT …`;
`gather ROOT… ` writes to `ROOT.pt` what it holds of each parameter after a load.

Megatron-core asks for CUDA tensors; `cpu_rank` gives it CPU ones. What Megatron-LM's own
`checkpointing.py`, which is not in the package, does around the core is done here in its order.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint

from tests.support import apex_adam, newest_megatron
from tests.support.cpu_rank import cpu_parts, cpu_rank, end_workers

BATCH = 8
GPT = {
    "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2,
    "kv_channels": 4,
}  # fmt: skip
"""The shape of --gpt, by the names that Megatron-LM's args have too."""
WORDS = 32
TRACKER = "latest_checkpointed_iteration.txt"


class Model(torch.nn.Module):
    """Two linear layers and a layer norm, which says how it is sharded: not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.norm = torch.nn.LayerNorm(8)

    def forward(self, x: Any) -> Any:
        return self.norm(self.down(torch.tanh(self.up(x))))

    def sharded_state_dict(self, prefix: str = "", *_: Any, **__: Any) -> dict[str, Any]:
        from megatron.core.dist_checkpointing import ShardedTensor

        return {
            prefix + name: ShardedTensor.from_rank_offsets(
                prefix + name, p, replica_id=dist.get_rank()
            )
            for name, p in self.named_parameters()
        }


def gpt(transformer: Any) -> Any:
    """The core's own model, that takes what the other one takes for the words of a text."""
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs

    cpu_parts()

    class Gpt(GPTModel):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            words = (x.float().abs() * 10).long() % WORDS
            positions = torch.arange(words.shape[1]).expand_as(words)
            return super().forward(words, positions, None)

    return Gpt(
        transformer,
        gpt_layer_specs.get_gpt_layer_local_spec(),
        vocab_size=WORDS,
        max_sequence_length=8,
    )


def logits(model: Any) -> dict[str, torch.Tensor]:
    """The attention logits of every layer for a fixed text: [heads, queries, keys], before mask and
    softmax, of the queries and keys that the core's attention is given."""
    told: dict[str, torch.Tensor] = {}

    def kept(name: str) -> Any:
        def hook(_: Any, given: Any) -> None:
            query, key = (each[:, 0].transpose(0, 1).double() for each in given[:2])
            key = key.repeat_interleave(len(query) // len(key), 0)
            told[name] = query @ key.mT / query.shape[-1] ** 0.5

        return hook

    hooks = [
        layer.self_attention.core_attention.register_forward_pre_hook(kept(f"layers.{i}"))
        for i, layer in enumerate(model.decoder.layers)
    ]
    model(torch.randn(1, 8, generator=torch.Generator().manual_seed(0)))
    for hook in hooks:
        hook.remove()
    return told


def build(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Model in DDP, optimizer, scheduler, as Megatron-LM makes them from its command line."""
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(args.seed)
    shape: dict[str, Any] = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    if args.gpt:
        shape = {name: getattr(args, name) for name in GPT}
        shape |= {"attention_dropout": 0.0, "hidden_dropout": 0.0, "params_dtype": _dtype(args)}
    transformer = TransformerConfig(**shape, use_cpu_initialization=True, fp16=args.fp16)
    model = gpt(transformer) if args.gpt else Model()
    return trained(transformer, model.half() if args.fp16 else model, args)


def trained(transformer: Any, model: Any, args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """This model in DDP, with optimizer and scheduler."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    distributed = args.use_distributed_optimizer
    ddp = DistributedDataParallel(
        transformer, DistributedDataParallelConfig(use_distributed_optimizer=distributed), model
    )
    config = OptimizerConfig(
        optimizer="adam", lr=args.lr, min_lr=args.min_lr, weight_decay=args.weight_decay,
        adam_beta1=0.9, adam_beta2=0.95,
        adam_eps=getattr(args, "adam_eps", 1e-8), use_distributed_optimizer=distributed,
        clip_grad=getattr(args, "clip_grad", 1.0),
        fp16=args.fp16, params_dtype=_dtype(args),
        initial_loss_scale=args.initial_loss_scale,
    )  # fmt: skip
    overrides = _mup(config, args.mup_width) if args.mup_width else {}
    optimizer = get_megatron_optimizer(config, [ddp], **overrides)
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=args.lr, min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_samples, lr_decay_steps=args.lr_decay_samples,
        lr_decay_style=args.lr_decay_style, start_wd=args.weight_decay, end_wd=args.weight_decay,
        wd_incr_steps=200, wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=args.use_checkpoint,
        override_opt_param_scheduler=args.override,
    )  # fmt: skip
    return ddp, optimizer, scheduler


def _dtype(args: argparse.Namespace) -> torch.dtype:
    return torch.float16 if args.fp16 else torch.float32


def _mup(config: Any, width: float) -> dict[str, Any]:
    """As `setup_model_and_optimizer` does for --use-mup."""
    from megatron.core.optimizer import get_mup_config_overrides, get_standard_config_overrides

    mup = get_mup_config_overrides(config, width, config.optimizer)
    return {"config_overrides": {**get_standard_config_overrides(config), **mup}}


def update(ddp: Any, optimizer: Any, scheduler: Any, number: int) -> None:
    ddp.zero_grad_buffer()
    optimizer.zero_grad()
    data = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
    loss = ddp(data.to(next(ddp.parameters()).dtype)).float().pow(2).sum()
    optimizer.scale_loss(loss).backward()
    ddp.finish_grad_sync()
    optimizer.step()
    scheduler.step(BATCH)


def save(root: Path, args: argparse.Namespace) -> None:
    ddp, optimizer, scheduler = build(args)
    for iteration in range(1, max(args.steps) + 1):
        update(ddp, optimizer, scheduler, iteration)
        args.consumed_train_samples = iteration * BATCH
        args.iteration = iteration
        if iteration in args.steps:
            folder = root / f"iter_{iteration:07d}"
            state = {
                "args": args, "checkpoint_version": 3.0, "iteration": iteration,
                "opt_param_scheduler": scheduler.state_dict(),
                "num_floating_point_operations_so_far": 0,
            }  # fmt: skip
            how = {"legacy": save_legacy, "torch_dcp": _save_flat}.get(args.sharding, save_dist)
            how(folder, state, ddp.module, optimizer, args)
            (root / TRACKER).write_text(str(iteration))


def rank_folder() -> str:
    """As Megatron-LM calls that of this rank's share of the model."""
    from megatron.core import parallel_state

    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    return name


def save_legacy(folder: Path, state: dict[str, Any], model: Any, optimizer: Any, args: Any) -> None:
    rank = folder / rank_folder()
    rank.mkdir(parents=True, exist_ok=True)
    if args.use_distributed_optimizer:
        optimizer.save_parameter_state(str(rank / "distrib_optim.pt"))
    state = {**state, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, rank / "model_optim_rng.pt")


def _save_flat(folder: Path, state: dict[str, Any], model: Any, optimizer: Any, args: Any) -> None:
    folder.mkdir(parents=True)
    state = {**state, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    writer = torch.distributed.checkpoint.FileSystemWriter(folder)
    torch.distributed.checkpoint.save(state_dict=state, storage_writer=writer)


def save_dist(folder: Path, state: dict[str, Any], model: Any, optimizer: Any, args: Any) -> None:
    from megatron.core import dist_checkpointing

    folder.mkdir(parents=True, exist_ok=True)  # each rank does
    metadata = {"distrib_optim_sharding_type": args.sharding}
    sharded = model.sharded_state_dict()
    state = {**state, "model": sharded}
    state["optimizer"] = optimizer.sharded_state_dict(sharded, metadata=metadata)
    dist_checkpointing.save(state, str(folder), content_metadata=metadata)
    if args.verify_integrity and dist.get_rank() == 0:  # newer versions write it themselves
        files = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir()}
        document = {"algorithm": "sha256", "files": dict(sorted(files.items()))}
        (folder / "integrity.json").write_text(json.dumps(document, indent=2))


def load(root: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Load through the tracker, as Megatron-LM does, and tell what the next step uses."""
    ddp, optimizer, scheduler = build(args)
    with torch.no_grad():
        state = resume(root, args, ddp, optimizer, scheduler)
        scheduler.load_state_dict(state["opt_param_scheduler"])
    told = {
        "iteration": state["iteration"],
        "consumed_samples": state["args"].consumed_train_samples,
        **_told(optimizer),
        "weights": _norm(p.data for p in ddp.parameters()),
        "loss_scale": float(optimizer.get_loss_scale()),
    }
    update(ddp, optimizer, scheduler, state["iteration"] + 1)
    then = {**_told(optimizer), "loss_scale": float(optimizer.get_loss_scale())}
    return {**told, "then": then}


def resume(
    root: Path, args: argparse.Namespace, ddp: Any, optimizer: Any, scheduler: Any
) -> dict[str, Any]:
    """Weights and optimizer of the step that the tracker names; the whole state is returned."""
    folder = root / f"iter_{int((root / TRACKER).read_text()):07d}"
    if args.sharding == "legacy":
        rank = folder / rank_folder()
        state = torch.load(rank / "model_optim_rng.pt", weights_only=False)
        ddp.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if args.use_distributed_optimizer:
            optimizer.load_parameter_state(str(rank / "distrib_optim.pt"))
        return state
    if args.sharding == "torch_dcp":
        held: dict[str, Any] = {
            "model": ddp.module.state_dict(), "args": None, "iteration": 1,
            "optimizer": optimizer.chained_optimizers[0].state_dict(is_loading=True),
            "checkpoint_version": None, "opt_param_scheduler": scheduler.state_dict(),
            "num_floating_point_operations_so_far": 0,
        }  # fmt: skip
        reader = torch.distributed.checkpoint.FileSystemReader(folder)
        torch.distributed.checkpoint.load(state_dict=held, storage_reader=reader)
        ddp.module.load_state_dict(held["model"])
        optimizer.load_state_dict(held["optimizer"])
        return held
    from megatron.core import dist_checkpointing

    common = dist_checkpointing.load_common_state_dict(str(folder))
    sharded = ddp.module.sharded_state_dict()
    wanted = {
        "model": sharded,
        "optimizer": optimizer.sharded_state_dict(
            sharded, is_loading=True, metadata=common["content_metadata"]
        ),
    }
    state = dist_checkpointing.load(wanted, str(folder))
    ddp.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state


def gather(root: Path, args: argparse.Namespace) -> dict[str, dict[str, torch.Tensor]]:
    """Weights, master and moments by the name of the parameter, after a load; which tensor of the
    optimizer is whose is megatron-core's own knowledge."""
    ddp, optimizer, scheduler = build(args)
    with torch.no_grad():
        resume(root, args, ddp, optimizer, scheduler)
    (own,) = optimizer.chained_optimizers
    held: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in ddp.module.named_parameters():
        main = getattr(parameter, "main_param", None)
        if args.use_distributed_optimizer:
            tensors = own._get_main_param_and_optimizer_states(parameter)
        else:
            state = own.optimizer.state[parameter if main is None else main]
            tensors = {"param": main, **state}
        held[name] = {
            key: tensor.detach().clone().view(parameter.shape)
            for key, tensor in (("weights", parameter), *tensors.items())
            if isinstance(tensor, torch.Tensor) and tensor.numel() == parameter.numel()
        }
    if args.gpt:
        with torch.no_grad():
            held["logits"] = logits(ddp.module)
    return held


def _told(optimizer: Any) -> dict[str, Any]:
    groups = optimizer.param_groups
    inner = optimizer.chained_optimizers[0].optimizer
    states = list(inner.state.values())
    return {
        "lr": [group["lr"] for group in groups],
        "weight_decay": [group["weight_decay"] for group in groups],
        "betas": [list(group["betas"]) for group in groups],
        "eps": [group["eps"] for group in groups],
        "adam_step": [group.get("step", 0) for group in groups],
        "exp_avg": _norm(state["exp_avg"] for state in states),
        "exp_avg_sq": _norm(state["exp_avg_sq"] for state in states),
    }


def _norm(tensors: Any) -> float:
    return float(sum(t.double().abs().sum() for t in tensors))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("save", "load", "gather"))
    parser.add_argument("roots", type=Path, nargs="+")
    parser.add_argument("--sharding", default="legacy")
    parser.add_argument("--steps", type=int, nargs="+", default=[2, 4, 6])
    parser.add_argument("--no-distributed", dest="use_distributed_optimizer", action="store_false")
    parser.add_argument("--verify-integrity", action="store_true")
    parser.add_argument("--use-checkpoint", action="store_true")
    parser.add_argument("--override", action="store_true")
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--gpt", action="store_true")
    parser.add_argument("--newest", action="store_true")
    parser.add_argument("--mup-width", type=float)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--min-lr", type=float, default=1e-4)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--initial-loss-scale", type=float, default=1024.0)
    parser.add_argument("--lr-decay-style", default="cosine")
    parser.add_argument("--lr-warmup-samples", type=int, default=16)
    parser.add_argument("--lr-decay-samples", type=int, default=200)
    args = parser.parse_args()
    if args.newest:
        newest_megatron.put_first()
    what, roots = args.what, args.roots
    del args.what, args.roots, args.newest
    args.tensor_model_parallel_size = args.pipeline_model_parallel_size = 1
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    args.expert_model_parallel_size, args.data_parallel_size = 1, ranks
    if args.gpt:
        vars(args).update(GPT, group_query_attention=True)
    args.global_batch_size, args.clip_grad, args.hysteresis = BATCH, 1.0, 2
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_stream = torch.cpu.current_stream  # type: ignore[assignment]
    apex_adam.install()
    from megatron.core import parallel_state

    with cpu_rank():
        parallel_state.initialize_model_parallel()
        for root in roots:
            if what == "save":
                save(root, args)
            elif what == "load":
                told = load(root, args)
                if dist.get_rank() == 0:  # the lines of two ranks would be mixed
                    print(json.dumps(told))
            else:
                torch.save(gather(root, args), root.with_name(f"{root.name}.pt"))
    end_workers()


if __name__ == "__main__":
    main()
