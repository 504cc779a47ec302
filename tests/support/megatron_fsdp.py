"""Runs of Megatron-LM with Megatron-FSDP on CPUs: `STOP RUN` trains to iteration STOP from what it
loads, and prints what each update used; `0 RUN… --gather` writes to `RUN.pt` what is held of each
parameter after a load. Other options are Megatron-LM's own.

Arguments, model, sharding, optimizer, schedule, training loop, save and load are those of the
newest `megatron.training` and `megatron.core`. What they ask torch.cuda for and a CPU has not
(streams, events, the kind of device, its random state) does nothing."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.support import apex_adam, newest_megatron
from tests.support.cpu_rank import cpu_parts, cpu_rank

LENGTH, WORDS = 8, 32
TRACKER = "latest_checkpointed_iteration.txt"
MOMENTS = ("exp_avg", "exp_avg_sq")
OPTIONS = """
    --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params
    --use-distributed-optimizer --ckpt-format fsdp_dtensor --no-gradient-accumulation-fusion
    --no-gradient-reduce-div-fusion
    --num-layers 2 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 4 --seq-length 8
    --max-position-embeddings 8 --attention-dropout 0 --hidden-dropout 0 --transformer-impl local
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion
    --no-bias-dropout-fusion --no-persist-layer-norm --disable-jit-fuser --use-cpu-initialization
    --untie-embeddings-and-output-weights --no-one-logger --micro-batch-size 4
    --global-batch-size 8 --train-samples 800 --lr-decay-samples 200 --lr-warmup-samples 16
    --lr-decay-style cosine --lr 1e-3 --min-lr 1e-4 --weight-decay 0.1 --adam-beta2 0.95
    --save-interval 2 --log-interval 1
"""


class Stream(torch.cpu.Stream):
    """One that nothing has to wait for."""

    def record_event(self) -> Any:
        return torch.cpu.Event()


def without_a_gpu() -> None:
    """What Megatron asks a GPU for."""
    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event, cuda.stream = Stream, torch.cpu.Event, torch.cpu.stream
    cuda.current_stream = lambda *_: Stream()
    cuda.synchronize = lambda *_: None
    cuda.current_device = lambda: 0
    cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0)
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda *_, **__: None


def provider(**given: Any) -> Any:
    """The core's own GPT, by the arguments."""
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.training.arguments import core_transformer_config_from_args
    from megatron.training.global_vars import get_args

    args = get_args()
    return GPTModel(
        core_transformer_config_from_args(args),
        gpt_layer_specs.get_gpt_layer_local_spec(args.num_experts),
        vocab_size=WORDS,
        max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=False,
        pg_collection=given["pg_collection"],
    )


def batches(args: Any) -> Iterator[torch.Tensor]:
    """The micro-batches of this rank, from the consumed samples on, in Megatron's order."""
    size, position = args.micro_batch_size, args.consumed_train_samples
    data_ranks = args.data_parallel_size
    position += dist.get_rank() * data_ranks // dist.get_world_size() * size
    while True:
        yield torch.stack([
            torch.randint(WORDS, (LENGTH + 1,), generator=torch.Generator().manual_seed(number))
            for number in range(position, position + size)
        ])  # fmt: skip
        position += size * data_ranks


def forward_step(data: Iterator[torch.Tensor], model: Any) -> Any:
    words = next(data)
    losses = model(
        words[:, :-1], torch.arange(LENGTH).expand(len(words), -1), None, labels=words[:, 1:]
    )

    def mean(losses: torch.Tensor) -> Any:
        loss = losses.float().mean()
        return loss, {"lm loss": loss.detach().clone()}

    return losses, mean


def setup(options: list[str]) -> tuple[Any, Any, Any, Any]:
    """Arguments, model, optimizer and schedule, after a load."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.enums import ModelType
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.global_vars import set_global_variables
    from megatron.training.training import setup_model_and_optimizer

    sys.argv = ["pretrain_gpt.py", *OPTIONS.split(), *options]
    args = parse_args()
    validate_args(args)
    args.padded_vocab_size = WORDS
    set_global_variables(args, build_tokenizer=False)
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
    )
    tracker = tensor_parallel.get_cuda_rng_tracker
    cpu_parts()
    tensor_parallel.get_cuda_rng_tracker = tracker
    torch.manual_seed(args.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    return args, *setup_model_and_optimizer(ModelType.encoder_or_decoder, provider)


def train(args: Any, model: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """To the end of this launch: what each update used, and what came out."""
    from megatron.core.utils import get_model_config
    from megatron.training import training

    seen: dict[str, Any] = {}

    def note(adam: Any, *_: Any) -> None:
        seen[str(args.curr_iteration + 1)] = used(adam, args)

    optimizer.optimizer.register_step_pre_hook(note)
    try:
        training.train(
            forward_step, model, optimizer, scheduler, batches(args), None, None,
            get_model_config(model[0]), {}, None,
        )  # fmt: skip
    except SystemExit as end:  # --exit-interval
        assert not end.code
    return {**seen, "end": used(optimizer.optimizer, args)["state"]}


def used(adam: Any, args: Any) -> dict[str, Any]:
    """The live settings, and what weights, gradients and moments are on each rank."""
    digest, moments = hashlib.sha256(), 0.0
    for group in adam.param_groups:
        for parameter in group["params"]:
            kept = [adam.state.get(parameter, {}).get(key) for key in MOMENTS]
            moments += sum(float(each.to_local().abs().sum()) for each in kept if each is not None)
            for tensor in (parameter.data, parameter.grad, *kept):
                if tensor is not None:
                    digest.update(tensor.to_local().contiguous().numpy().tobytes())
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, (digest.hexdigest(), moments))
    return {
        **{key: [group[key] for group in adam.param_groups]
           for key in ("lr", "betas", "eps", "weight_decay")},
        "adam_step": [group.get("step", 0) for group in adam.param_groups],
        "consumed_samples": args.consumed_train_samples,
        "moments": sum(moments for _, moments in states),
        "state": [state for state, _ in states],
    }  # fmt: skip


def gather(optimizer: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Weights and moments of each parameter by its name, put together from all ranks."""
    held: dict[str, dict[str, torch.Tensor]] = {}
    for group in optimizer.optimizer.param_groups:
        for parameter in group["params"]:
            tensors = {"weights": parameter.data, **optimizer.optimizer.state[parameter]}
            held[optimizer._param_name(parameter)] = {
                key: whole(tensors[key]) for key in ("weights", *MOMENTS)
            }
    return held


def whole(cut: Any) -> torch.Tensor:
    """gloo gathers no tensors of different sizes, as Megatron's own function for it asks."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor

    chunk = uneven_dtensor.gather_and_compute_chunk_metadata(cut)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (chunk.offsets, cut.to_local().clone()))
    out = torch.empty(cut.shape)
    for offsets, part in parts:
        at = zip(offsets, part.shape, strict=True)
        out[tuple(slice(offset, offset + size) for offset, size in at)] = part
    return out


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("stop", type=int)
    parser.add_argument("roots", type=Path, nargs="+")
    parser.add_argument("--gather", action="store_true")
    given, options = parser.parse_known_args()
    torch.set_num_threads(1)
    newest_megatron.put_first()
    apex_adam.install()
    with cpu_rank():
        without_a_gpu()
        root = str(given.roots[0])
        load = ["--load", root, "--exit-on-missing-checkpoint"] * Path(root, TRACKER).exists()
        options += ["--save", root, *load, "--exit-interval", str(given.stop)]
        args, model, optimizer, scheduler = setup(options)
        if not given.gather:
            told = train(args, model, optimizer, scheduler)
            sys.stdout.flush()
            dist.barrier()
            if dist.get_rank() == 0:
                print(json.dumps(told), flush=True)
        for root in given.roots if given.gather else ():
            from megatron.training.checkpointing import load_checkpoint

            args.load = str(root)
            load_checkpoint(model, optimizer, scheduler)
            held = gather(optimizer)
            if dist.get_rank() == 0:
                torch.save(held, root.with_name(f"{root.name}.pt"))


if __name__ == "__main__":
    main()
