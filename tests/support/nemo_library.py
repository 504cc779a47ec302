"""NeMo 2 on a CPU: its trainer, strategy, optimizer, schedulers and savers, with the megatron-core
that it asks for, beside a present torch and Lightning.

Its packages import every collection; what a GPT is trained, saved and resumed with is taken from
their folders alone. Declared, as none of it is asked for here: hydra and the tokenizers (no config
and no text is read), ModelOpt (no model is quantized), EMA and NVIDIA's logger and resiliency
extension (none is used). In place of a GPU: its streams, its random numbers and pinned memory."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from tests.support import apex_adam
from tests.support.cpu_rank import OnCpu, cpu_parts
from tests.support.declared import put
from tests.support.newest_megatron import beside

SOURCES, BESIDE = beside("sources"), beside("nemo")
LLM = "nemo.collections.llm"
PACKAGES = (
    "nemo.core", "nemo.collections", LLM, f"{LLM}.gpt", f"{LLM}.gpt.model", f"{LLM}.gpt.data",
    f"{LLM}.modelopt", "nemo.collections.common",
)  # fmt: skip
"""Whose `__init__` is left out."""


class Unpinned(OnCpu):
    """CPU tensors, and no memory that is pinned for a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {key: value for key, value in (kwargs or {}).items() if key != "pin_memory"}
        return super().__torch_function__(func, types, args, kwargs)


def load() -> None:
    """Import it, in a process that has imported nothing of megatron."""
    sys.path.insert(0, str(BESIDE))
    sys.path.append(str(SOURCES))
    apex_adam.install()
    vars(sys.modules["apex.optimizers"])["FusedLAMB"] = None
    _cpu()
    _declare()
    import_module("nemo")
    for name in PACKAGES:
        put(name, [str(SOURCES / name.replace(".", "/"))])
    _declare_inside()
    import_module("nemo.lightning")
    cpu_parts()
    saver: Any = import_module("nemo.lightning.io.pl")
    saver._fix_tensors_device = lambda checkpoint: checkpoint  # which moves it to the GPU
    strategy: Any = import_module("nemo.lightning.pytorch.strategies").MegatronStrategy
    by_itself = strategy.load_checkpoint

    def load_checkpoint(self: Any, path: Any, weights_only: Any = None, **more: Any) -> Any:
        """Lightning says since 2.6 how a file is unpickled; here is none."""
        return by_itself(self, path, **more)

    strategy.load_checkpoint = load_checkpoint


def _nothing(*_: Any, **__: Any) -> None:
    """What ModelOpt does to a model that it has not changed."""


def _cpu() -> None:
    torch.compiler.set_stance("force_eager")
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = cuda.empty_cache = cuda.set_device = lambda *_: None
    cuda.Stream, cuda.current_stream = torch.cpu.Stream, torch.cpu.current_stream
    cuda.stream = lambda _: nullcontext()
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device="cuda": torch.get_rng_state()
    cuda.set_rng_state = lambda *_: None
    mesh: Any = import_module("torch.distributed.device_mesh")
    if not hasattr(mesh, "_mesh_resources"):
        mesh._mesh_resources = None  # imported for FSDP2


def _declare() -> None:
    local = "nvidia_resiliency_ext.ptl_resiliency.local_checkpoint_callback"
    for name in ("hydra", "hydra.core", "nvidia_resiliency_ext", local.rpartition(".")[0]):
        put(name, [])
    put(local, [], LocalCheckpointCallback=type("Local", (), {}))
    put("hydra.utils", [], get_original_cwd=None, instantiate=None)
    put("hydra.core.hydra_config", [], HydraConfig=object)
    store = type("ConfigStore", (), {"instance": classmethod(lambda cls: cls()), "store": _nothing})
    put("hydra.core.config_store", [], ConfigStore=store)
    put("hydra._internal", [])
    put("hydra._internal.utils", [], _run_hydra=None, get_args_parser=None)
    put("hydra.types", [], TaskFunction=object)
    loggers: Any = import_module("lightning.pytorch.loggers")
    for name in ("NeptuneLogger", "MLFlowLogger", "WandbLogger"):
        if not hasattr(loggers, name):
            setattr(loggers, name, type(name, (), {}))


def _declare_inside() -> None:
    common = "nemo.collections.common"
    put("nemo.core.classes", [], Dataset=object)
    put(f"{common}.tokenizers", [])
    put(f"{common}.tokenizers.tokenizer_spec", [], TokenizerSpec=object)
    put(f"{common}.tokenizers.tokenizer_utils", [], get_nmt_tokenizer=None)
    put(f"{common}.callbacks", [], EMA=type("EMA", (), {}))
    put(f"{common}.callbacks.ipl_epoch_stopper", [], IPLEpochStopper=object)
    put(
        f"{LLM}.modelopt.model_utils", [],
        save_modelopt_state=_nothing, restore_modelopt_state=_nothing,
    )  # fmt: skip
    put(f"{LLM}.modelopt.distill", [])
    put(
        f"{LLM}.modelopt.distill.utils", [],
        get_tensor_shapes_adjust_fn_for_distillation=_nothing,
    )  # fmt: skip
    silent = ModuleType("nemo.lightning.one_logger_callback")
    vars(silent)["OneLoggerNeMoCallback"] = type("Silent", (), {})
    sys.modules[silent.__name__] = silent
