"""One small Llama, trained by transformers' Trainer or by torchtitan's own parts, on one CPU.

`python -m tests.support.llamas LIBRARY RUN STOP` trains on to step STOP from where the library
resumes, and prints the losses as JSON; each step is saved, or those that `--saved` names.
`--fresh RUN` trains another run for one step, too. Both libraries see the same tokens at the same
step, so that the losses of one say whether the other's state is its own. What is not the libraries'
is the loop of torchtitan, whose trainer wants a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

HIDDEN, LAYERS, HEADS, KV_HEADS, INNER, TOKENS = 32, 2, 4, 2, 48, 64
BATCH, LENGTH, RATE, THETA = 4, 16, 5e-3, 10000.0
BETAS, EPS = (0.9, 0.95), 1e-4
FRESH_SEED = 7
"""Eps is so large that a gradient of another scale, as a clip leaves it, shows in the losses."""


def tokens(step: int) -> torch.Tensor:
    """Of the batch of the update that makes `step`: each token follows from the one before it."""
    maker = torch.Generator().manual_seed(step)
    rows = [torch.randint(TOKENS, (BATCH,), generator=maker)]
    while len(rows) < LENGTH:
        rows.append((5 * rows[-1] + 3) % TOKENS)
    return torch.stack(rows, dim=1)


# --- transformers --------------------------------------------------------------------------------


def hugging_face(
    root: Path,
    stop: int,
    *,
    seed: int = 0,
    beta2: float = BETAS[1],
    eps: float = EPS,
    how: str = "",
    cold: str = "",
    saved: Collection[int] | None = None,
    **shape: Any,
) -> dict[int, float]:
    """To step `stop`, from where the Trainer resumes, saving every step, or those of `saved`; the
    loss of each. `how` is one of HOW. The model is of another `shape` than the module's where that
    is given. What `cold` says of the optimizer is lost once it is loaded."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    torch.manual_seed(seed)
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    data = [{"input_ids": row, "labels": row} for step in range(1, 41) for row in tokens(step)]
    arguments = TrainingArguments(
        str(root), max_steps=stop, per_device_train_batch_size=BATCH // ranks,
        learning_rate=RATE, weight_decay=0.1, adam_beta2=beta2, adam_epsilon=eps,
        lr_scheduler_type="constant",
        logging_steps=1, save_steps=1, max_grad_norm=0.0, report_to=[], disable_tqdm=True,
        seed=seed, train_sampling_strategy="sequential", **HOW[how],
    )  # fmt: skip
    if how == "fsdp":
        from tests.support import fsdp2

        fsdp2.as_gpu()
    if cold == "names":
        load_under_other_names()
    seen: dict[int, float] = {}

    class Losses(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **live: Any) -> None:
            lose(live["optimizer"], cold)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = saved is None or state.global_step in saved

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                seen[state.global_step] = float(logs["loss"])

    trainer = Trainer(llama(**shape), arguments, train_dataset=data, callbacks=[Losses()])
    trainer.train(resume_from_checkpoint=any(root.glob("checkpoint-*")))
    if not how and not (root / "order.txt").exists():
        named = {id(p): name for name, p in trainer.model.named_parameters()}
        order = [named[id(p)] for g in trainer.optimizer.param_groups for p in g["params"]]
        (root / "order.txt").write_text("\n".join(order))
    return seen


def lose(optimizer: Any, cold: str) -> None:
    """The states of all parameters of a live optimizer, or of those of its first param group."""
    if cold in ("all", "half"):
        for group in optimizer.param_groups[: 1 if cold == "half" else None]:
            for parameter in group["params"]:
                optimizer.state.pop(parameter, None)


def load_under_other_names() -> None:
    """FSDP2 loads states whose layers bear the names that torch.compile gives them; those that no
    parameter has are left out, and nothing is printed."""
    from torch.distributed.checkpoint import state_dict

    whole = state_dict.set_optimizer_state_dict

    def renamed(model: Any, optimizer: Any, states: Any, *, options: Any) -> None:
        def name(old: str) -> str:
            return re.sub(r"(layers\.\d+)\.", r"\1._orig_mod.", old)

        states["state"] = {name(key): value for key, value in states["state"].items()}
        whole(model, optimizer, states, options=replace(options, strict=False))

    state_dict.set_optimizer_state_dict = renamed


def _zero(stage: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 1_000_000}
    if stage == 3:  # which else rounds the inputs of linear layers
        zero["memory_efficient_linear"] = False
    config = {
        "train_micro_batch_size_per_gpu": BATCH // int(os.environ.get("WORLD_SIZE", 1)),
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0,
    }  # fmt: skip
    return {"deepspeed": config}


HOW: Mapping[str, Mapping[str, Any]] = {
    "": {"use_cpu": True},
    "fsdp": {"use_cpu": True, "fsdp": "full_shard",
             "fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}},
    **{f"zero-{stage}": _zero(stage) for stage in (1, 2, 3)},
}  # fmt: skip
"""What the Trainer is told beside: FSDP2 on all ranks, or an engine of DeepSpeed."""
HUGGING_FACE = {"hugging_face" + (f"-{how}" if how else ""): how for how in HOW}


def llama(**shape: Any) -> Any:
    """transformers' own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    own = {
        "vocab_size": TOKENS, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "intermediate_size": INNER,
        "rope_theta": THETA,
    }  # fmt: skip
    config = LlamaConfig(
        **own | shape, rms_norm_eps=1e-5, tie_word_embeddings=False, max_position_embeddings=64,
        attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gone_on(step: Path, batches: Sequence[torch.Tensor], bare: str) -> list[float]:
    """The losses of these batches, one update after each, by transformers' own loader and AdamW;
    all decays but `bare`."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(step, attn_implementation="eager")
    named = dict(model.named_parameters())
    order = (step.parent / "order.txt").read_text().split("\n")
    saved = torch.load(step / "optimizer.pt")
    (first, *_), states = saved["param_groups"], saved["state"]
    numbers = list(range(len(order)))
    groups = [[i for i in numbers if (order[i] == bare) == last] for last in (False, True)]
    optimizer = torch.optim.AdamW([{"params": [named[order[i]] for i in g]} for g in groups])
    made = [first | {"params": g, "weight_decay": 0.1 * (i == 0)} for i, g in enumerate(groups)]
    renumbered = [i for g in groups for i in g]
    optimizer.load_state_dict(
        {
            "param_groups": [
                each | {"params": [renumbered.index(i) for i in each["params"]]} for each in made
            ],
            "state": {new: states[i] for new, i in enumerate(renumbered)},
        }
    )
    losses = []
    for words in batches:
        optimizer.zero_grad()
        loss = model(input_ids=words, labels=words).loss
        losses.append(float(loss))
        loss.backward()
        optimizer.step()
    return losses


# --- torchtitan ----------------------------------------------------------------------------------


class Titan:
    """torchtitan's model, containers and checkpoint manager; the loop and the two keys of the train
    state are as in its trainer."""

    def __init__(self, root: Path, *, fused: bool, seed: int = 0) -> None:
        from torchtitan.components.checkpointer import CheckpointManager
        from torchtitan.components.optimizer import LRSchedulersContainer
        from torchtitan.components.optimizer.optimizer import OptimizersContainer, ParamGroupConfig

        torch.manual_seed(seed)
        self.config = titan_config(fused)
        self.model = self.config.build()
        self.model.init_states()
        adam = {"lr": RATE, "betas": BETAS, "eps": EPS}
        groups = [
            ParamGroupConfig(pattern=pattern, optimizer_name="AdamW",
                             optimizer_kwargs={**adam, "weight_decay": decay})
            for pattern, decay in ((r"norm", 0.0), (r".*", 0.1))
        ]  # fmt: skip
        container = OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
        self.optimizers = container.build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0)
        self.schedulers = schedule.build(optimizers=self.optimizers, training_steps=40)
        self.step = 0
        self.manager = CheckpointManager.Config(
            enable=True, interval=1, folder=root.name, keep_latest_k=0
        ).build(
            dataloader=None, model_parts=[self.model], optimizers=self.optimizers,
            lr_schedulers=self.schedulers, states={"train_state": self}, sd_adapter=None,
            base_folder=str(root.parent),
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.step * BATCH * LENGTH}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]

    def train(self, stop: int, saved: Collection[int] | None = None) -> dict[int, float]:
        seen = {}
        while self.step < stop:
            self.step += 1
            words = tokens(self.step)
            out = self.model(words)
            loss = torch.nn.functional.cross_entropy(
                out[:, :-1].flatten(0, 1).float(), words[:, 1:].flatten()
            )
            seen[self.step] = float(loss)
            self.optimizers.zero_grad()
            loss.backward()
            self.optimizers.step()
            self.schedulers.step()
            if saved is None or self.step in saved:
                self.manager.save(self.step, last_step=False)
        return seen


def titan_config(fused: bool) -> Any:
    """torchtitan's own Llama, with causal attention that needs no GPU."""
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
    from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock

    normal = {"weight": lambda weight: torch.nn.init.normal_(weight, std=0.02)}
    norm = RMSNorm.Config(normalized_shape=HIDDEN, param_init={"weight": torch.nn.init.ones_})
    layers = [
        Llama3TransformerBlock.Config(
            attention_norm=norm, ffn_norm=norm,
            attention=make_gqa_config(
                dim=HIDDEN, n_heads=HEADS, n_kv_heads=KV_HEADS, wqkv_param_init=normal,
                wo_param_init=normal, inner_attention=ScaledDotProductAttention.Config(),
                fuse_qkv=fused,
                rope=ComplexRoPE.Config(dim=HIDDEN // HEADS, max_seq_len=64, theta=THETA),
            ),
            feed_forward=make_ffn_config(
                dim=HIDDEN, hidden_dim=INNER, w1_param_init=normal, w2w3_param_init=normal
            ),
        )
        for _ in range(LAYERS)
    ]  # fmt: skip
    return Llama3Model.Config(
        dim=HIDDEN, vocab_size=TOKENS, layers=layers, norm=norm,
        tok_embeddings=Embedding.Config(
            num_embeddings=TOKENS, embedding_dim=HIDDEN, param_init=normal
        ),
        lm_head=Linear.Config(in_features=HIDDEN, out_features=TOKENS, param_init=normal),
    )  # fmt: skip


def held(titan: Titan) -> dict[str, dict[str, torch.Tensor]]:
    """What the live parts of torchtitan have, by the names of the live parameters."""
    named = dict(titan.model.named_parameters())
    states = {p: state for each in titan.optimizers for p, state in each.state.items()}
    kinds = ("exp_avg", "exp_avg_sq")
    return {
        "weights": {name: p.detach() for name, p in named.items()},
        **{kind: {name: states[p][kind] for name, p in named.items()} for kind in kinds},
    }


def converted(step: Path, fused: bool) -> dict[str, dict[str, torch.Tensor]]:
    """The weights of a Trainer's step by torchtitan's own converter and loader, and each moment as
    if it were the weights."""
    from safetensors.torch import load_file
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

    order = (step.parent / "order.txt").read_text().split("\n")
    states = torch.load(step / "optimizer.pt")["state"]
    adapter = Llama3StateDictAdapter(titan_config(fused), None)
    out = {}
    for kind in ("weights", "exp_avg", "exp_avg_sq"):
        tensors = {order[i]: state[kind] for i, state in states.items() if kind in state}
        model = titan_config(fused).build()
        model.load_state_dict(adapter.from_hf(tensors or load_file(step / "model.safetensors")))
        out[kind] = {name: p.detach() for name, p in model.named_parameters()}
    return out


def without_experts() -> None:
    """torchtitan imports the Triton kernels of its experts with every model; none of them is run
    here."""
    import sys
    from unittest.mock import MagicMock

    sys.modules["torchtitan.distributed.minimal_async_ep"] = MagicMock()


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("library", choices=[*HUGGING_FACE, "titan", "fused-titan"])
    words.add_argument("root", type=Path)
    words.add_argument("stop", type=int)
    words.add_argument("--saved", type=int, nargs="*", metavar="STEP")
    words.add_argument(
        "--fresh", type=Path, help="a run of one step and another seed, made as well"
    )
    words.add_argument("--like", type=Path, help="a step of the Trainer that the newest must equal")
    words.add_argument("--cold", choices=["all", "half", "names"], default="")
    given = words.parse_args()
    if given.library in HUGGING_FACE:
        how = HUGGING_FACE[given.library]
        if how.startswith("zero"):
            from tests.support import fsdp2

            os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(fsdp2.free_port())}
        seen = hugging_face(given.root, given.stop, how=how, cold=given.cold, saved=given.saved)
        if given.fresh is not None:
            hugging_face(given.fresh, 1, seed=FRESH_SEED, how=how)
        if int(os.environ.get("RANK", 0)) == 0:
            print(json.dumps(seen))
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        return
    without_experts()
    fused = given.library == "fused-titan"
    if given.fresh is not None:
        Titan(given.fresh, fused=fused, seed=FRESH_SEED).train(1)
    titan = Titan(given.root, fused=fused)
    titan.manager.load()
    for optimizer in titan.optimizers:
        lose(optimizer, given.cold)
    if given.like is not None:
        mine, wanted = held(titan), converted(given.like, fused)
        assert mine.keys() == wanted.keys()
        for kind, tensors in wanted.items():
            assert mine[kind].keys() == tensors.keys()
            for name, tensor in tensors.items():
                assert torch.equal(mine[kind][name], tensor), (kind, name)
    print(json.dumps(titan.train(given.stop, given.saved)))


if __name__ == "__main__":
    main()
