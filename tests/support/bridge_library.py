"""Megatron-Bridge on a CPU: what imports of it here, with the newest megatron-core.

Its packages import every model that it converts and every source of data; what a GPT is trained,
saved and loaded with is taken from their folders alone. Declared, as none of it is asked for here:
ModelOpt (no model is quantized), Energon and datasets (the data is made), LoRA (no adapter)."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch

from tests.support import apex_adam, newest_megatron
from tests.support.cpu_rank import cpu_parts
from tests.support.declared import put

SOURCES = newest_megatron.beside("sources")
PACKAGES = ("megatron.bridge", "megatron.bridge.models", "megatron.bridge.models.hf_pretrained")
"""Whose `__init__` is left out."""


def load() -> None:
    """Import it, in a process that has imported nothing of megatron."""
    newest_megatron.put_first()
    sys.path.append(str(SOURCES))
    apex_adam.install()
    _cpu()
    import_module("transformers")
    import_module("megatron.training.checkpointing")  # it looks for ModelOpt, too
    for name in PACKAGES:
        put(name, [str(SOURCES / name.replace(".", "/"))])
    _declare()
    models = sys.modules["megatron.bridge.models"]
    for module, provider in (
        ("gpt_provider", "GPTModelProvider"),
        ("t5_provider", "T5ModelProvider"),
    ):
        found = getattr(import_module(f"megatron.bridge.models.{module}"), provider)
        setattr(models, provider, found)
    tensor_parallel = import_module("megatron.core.tensor_parallel")
    tracker = tensor_parallel.get_cuda_rng_tracker
    cpu_parts()
    tensor_parallel.get_cuda_rng_tracker = tracker  # its states are saved


def _cpu() -> None:
    """In place of a GPU's streams and of its random numbers."""
    torch.compiler.set_stance("force_eager")
    cuda: Any = torch.cuda
    cuda.synchronize = cuda.empty_cache = lambda *_: None
    cuda.Stream, cuda.current_stream = torch.cpu.Stream, torch.cpu.current_stream
    cuda.stream = lambda _: nullcontext()
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device="cuda": torch.get_rng_state()
    cuda.set_rng_state = lambda *_: None


def _declare() -> None:
    def nothing(*_: Any, **__: Any) -> None:
        """What ModelOpt does to a model that it has not changed."""

    for name in ("modelopt", "modelopt.torch", "modelopt.torch.opt", "modelopt.torch.distill"):
        put(name, [])
    put(
        "modelopt.torch.opt.plugins", [],
        restore_modelopt_state=nothing, save_modelopt_state=nothing,
        save_sharded_modelopt_state=nothing,
    )  # fmt: skip
    put("modelopt.torch.distill.plugins", [])
    put(
        "modelopt.torch.distill.plugins.megatron", [],
        get_tensor_shapes_adjust_fn_for_distillation=nothing,
    )  # fmt: skip
    put("datasets", [], load_dataset=None, concatenate_datasets=None, Dataset=object)
    put("datasets.builder", [])
    put(
        "megatron.energon", [],
        WorkerConfig=object, get_savable_loader=None, get_train_dataset=None,
    )  # fmt: skip
    import_module("megatron.bridge.peft")
    put("megatron.bridge.peft.lora", [], LoRA=type("LoRA", (), {}))
