"""The Llama of `llamas`, trained by megatron-core's own model, optimizer and checkpoints on a CPU.

`python -m tests.support.megatron_llama RUN STOP` trains on to step STOP from where the tracker
says, saves each step by `dist_checkpointing`, or those that `--saved` names, and prints the losses
as JSON; `--fresh RUN` trains another run for one step, too.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support import apex_adam, llamas, megatron_real, newest_megatron
from tests.support.cpu_rank import cpu_parts, cpu_rank, end_workers

SHAPE = {
    "num_layers": llamas.LAYERS, "hidden_size": llamas.HIDDEN, "num_query_groups": llamas.KV_HEADS,
    "num_attention_heads": llamas.HEADS, "kv_channels": llamas.HIDDEN // llamas.HEADS,
    "ffn_hidden_size": llamas.INNER,
}  # fmt: skip
"""By the names that Megatron-LM's args have too."""


def model(args: argparse.Namespace) -> tuple[Any, Any]:
    """The core's config, and its own model."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer import TransformerConfig

    cpu_parts()
    torch.manual_seed(args.seed)
    config = TransformerConfig(
        **{name: getattr(args, name) for name in SHAPE},
        use_cpu_initialization=True, attention_dropout=0.0, hidden_dropout=0.0,
        normalization="RMSNorm", layernorm_epsilon=1e-5, add_bias_linear=False,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        pipeline_dtype=torch.float32, **_experts(args),
    )  # fmt: skip
    spec = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=args.num_experts, normalization="RMSNorm"
    )
    return config, GPTModel(
        config, spec, vocab_size=args.padded_vocab_size, max_sequence_length=64,
        position_embedding_type="rope", rotary_base=int(llamas.THETA),
        share_embeddings_and_output_weights=False, parallel_output=False,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )  # fmt: skip


def _experts(args: argparse.Namespace) -> dict[str, Any]:
    """Of each word the two best ones; nothing balances them."""
    return {} if args.num_experts is None else {
        "num_moe_experts": args.num_experts, "moe_router_topk": 2,
        "moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "allgather",
        "expert_model_parallel_size": args.expert_model_parallel_size,
        "expert_tensor_parallel_size": args.expert_tensor_parallel_size,
        "sequence_parallel": args.tensor_model_parallel_size > 1,
        "moe_ffn_hidden_size": args.ffn_hidden_size,
    }  # fmt: skip


def update(ddp: Any, optimizer: Any, scheduler: Any, step: int) -> float:
    """One update, of each stage in turn; the loss."""
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads

    ddp.zero_grad_buffer()
    optimizer.zero_grad()
    words = llamas.tokens(step)
    positions = torch.arange(words.shape[1]).expand_as(words)
    first, last = ddp.module.pre_process, ddp.module.post_process
    hidden = ddp.module.config.hidden_size
    between = torch.zeros(words.shape[1], words.shape[0], hidden, requires_grad=not first)
    if not first:
        dist.recv(between.detach(), parallel_state.get_pipeline_model_parallel_prev_rank())
        ddp.module.set_input_tensor([between])
    out = ddp(words, positions, None)
    loss = torch.zeros(())
    if last:
        loss = torch.nn.functional.cross_entropy(
            out[:, :-1].flatten(0, 1).float(), words[:, 1:].flatten()
        )
        optimizer.scale_loss(loss).backward()
    else:
        following = parallel_state.get_pipeline_model_parallel_next_rank()
        dist.send(out.detach().contiguous(), following)
        dist.recv(between, following)
        out.backward(between)
    if not first:
        assert between.grad is not None
        dist.send(between.grad, parallel_state.get_pipeline_model_parallel_prev_rank())
    finalize_model_grads([ddp])
    optimizer.step()
    scheduler.step(llamas.BATCH)
    told = loss.detach().clone()
    if not (first and last):
        dist.broadcast(told, dist.get_world_size() - 1)
    return float(told)


def train(
    root: Path, stop: int, args: argparse.Namespace, saved: Collection[int] | None = None
) -> dict[int, float]:
    ddp, optimizer, scheduler = megatron_real.trained(*model(args), args)
    step = 0
    if (root / megatron_real.TRACKER).exists():
        with torch.no_grad():
            state = megatron_real.resume(root, args, ddp, optimizer, scheduler)
            scheduler.load_state_dict(state["opt_param_scheduler"])
        step = state["iteration"]
    seen = {}
    while step < stop:
        step += 1
        seen[step] = update(ddp, optimizer, scheduler, step)
        if saved is not None and step not in saved:
            continue
        args.consumed_train_samples, args.iteration = step * llamas.BATCH, step
        state = {
            "args": args, "checkpoint_version": 3.0, "iteration": step,
            "opt_param_scheduler": scheduler.state_dict(),
            "num_floating_point_operations_so_far": 0,
        }  # fmt: skip
        folder = root / f"iter_{step:07d}"
        save = megatron_real.save_legacy if args.sharding == "legacy" else megatron_real.save_dist
        save(folder, state, ddp.module, optimizer, args)
        if dist.get_rank() == 0:
            (root / megatron_real.TRACKER).write_text(str(step))
        dist.barrier()
    return seen


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Those of the command line, and the others that Megatron-LM saves."""
    words = argparse.ArgumentParser()
    words.add_argument("root", type=Path)
    words.add_argument("stop", type=int)
    words.add_argument("--saved", type=int, nargs="*", metavar="STEP")
    words.add_argument(
        "--fresh", type=Path, help="a run of one step and another seed, made as well"
    )
    words.add_argument("--tensor", dest="tensor_model_parallel_size", type=int, default=1)
    words.add_argument("--stages", dest="pipeline_model_parallel_size", type=int, default=1)
    words.add_argument("--experts", dest="num_experts", type=int)
    words.add_argument("--expert-ranks", dest="expert_model_parallel_size", type=int, default=1)
    words.add_argument("--expert-tensor", dest="expert_tensor_parallel_size", type=int)
    words.add_argument("--newest", action="store_true")
    words.add_argument("--sharding", default="fully_reshardable")
    words.add_argument("--no-distributed", dest="use_distributed_optimizer", action="store_false")
    args = words.parse_args(given)
    args.seed = 1234
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    model_ranks = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    args.data_parallel_size = ranks // model_ranks
    vars(args).update(
        SHAPE, padded_vocab_size=llamas.TOKENS, group_query_attention=True,
        global_batch_size=llamas.BATCH, clip_grad=0.0, hysteresis=2, fp16=False,
        lr=llamas.RATE, min_lr=llamas.RATE, weight_decay=0.1, initial_loss_scale=1.0,
        mup_width=None, adam_eps=llamas.EPS,
        lr_warmup_samples=0, lr_decay_samples=200, lr_decay_style="constant", use_checkpoint=False,
        override=False, verify_integrity=False, gpt=True,
    )  # fmt: skip
    return args


def as_gpu() -> None:
    """What the optimizer and the writer of megatron-core ask for."""
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_stream = torch.cpu.current_stream  # type: ignore[assignment]
    apex_adam.install()


def main() -> None:
    args = arguments()
    if args.newest:
        newest_megatron.put_first()
    root, stop, fresh, saved = args.root, args.stop, args.fresh, args.saved
    del args.root, args.stop, args.fresh, args.saved, args.newest
    as_gpu()
    from megatron.core import parallel_state

    with cpu_rank():
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        )
        seen = train(root, stop, args, saved)
        if fresh is not None:
            args.seed = llamas.FRESH_SEED
            train(fresh, 1, args)
        if dist.get_rank() == 0:
            print(json.dumps(seen))
        parallel_state.destroy_model_parallel()
    end_workers()


if __name__ == "__main__":
    main()
