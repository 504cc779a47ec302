"""The globals that trainers write into shards, and that do no harm when they are called; any other
is reported, and not written by default.

A shard is read without importing what it names, but the trainer that loads it imports and calls it.
So a surgery must not hand it on silently.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.hints import again

EXACT = frozenset(
    {
        "_codecs.encode",
        "argparse.Namespace",
        "collections.Counter",
        "collections.OrderedDict",
        "collections.defaultdict",
        "collections.deque",
        "numpy.dtype",
        "numpy.ndarray",
        "pathlib.PosixPath",
        "pathlib._local.PosixPath",
        "signal.Signals",
        "torch.Size",
        "torch.Tensor",
        "torch.device",
        "torch.nn.parameter.Parameter",
        "torch._tensor._rebuild_from_type_v2",
        "torch.storage.UntypedStorage",
        "torch.torch_version.TorchVersion",
    }
    | {f"datetime.{kind}" for kind in ("date", "datetime", "time", "timedelta", "timezone")}
    | {
        f"torch._utils._rebuild_{name}"
        for name in (
            "tensor", "tensor_v2", "tensor_v3", "parameter", "parameter_with_state",
            "wrapper_subclass",
        )
    }
    | {  # what optimizers keep that is no plain tensor
        f"torchao.optim.subclass_{kind}"
        for kind in ("4bit.OptimState4bit", "8bit.OptimState8bit", "fp8.OptimStateFp8")
    }
    | {
        f"pytorch_optimizer.optimizer.{name}"
        for name in (
            "scion.LMONorm", "utils.galore.GaLoreProjector", "utils.graft.SGDGraft",
            "utils.partition.PreConditionerType", "utils.preconditioner.PreConditioner",
        )
    }
    | {  # MMEngine's log, in each of its files
        f"mmengine.logging.history_buffer.HistoryBuffer{name}"
        for name in ("", ".current", ".max", ".mean", ".min")
    }
    | {  # and the shape of its OneCycleLR
        f"mmengine.optim.scheduler.param_scheduler.OneCycleParamScheduler{name}"
        for name in ("", "._annealing_cos", "._annealing_linear")
    }
    | {  # what a model is made of that is saved as one object
        f"torch.nn.modules.{name}"
        for name in (
            "activation.MultiheadAttention", "activation.ReLU", "activation.SiLU",
            "activation.Tanh", "batchnorm.BatchNorm2d", "container.ModuleList",
            "container.Sequential", "conv.Conv2d", "conv.ConvTranspose2d", "dropout.Dropout",
            "linear.Identity", "linear.Linear", "linear.NonDynamicallyQuantizableLinear",
            "normalization.LayerNorm", "padding.ZeroPad2d", "pooling.AdaptiveAvgPool2d",
            "pooling.MaxPool2d", "sparse.Embedding", "upsampling.Upsample",
        )
    }
    | {
        "apollo_torch.random_projector.GradientProjector",
        "apollo_torch.svd_projector.GaLoreProjector",
        "galore_torch.galore_projector.GaLoreProjector",
    }
    | {
        f"numpy.{core}.multiarray.{name}"
        for core in ("core", "_core")
        for name in ("_reconstruct", "scalar")
    }
    | {
        f"torch.{kind}Storage"
        for kind in (
            "Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool",
            "ComplexFloat", "ComplexDouble", "Untyped",
        )
    }
    | {
        f"torch.{dtype}"
        for dtype in (
            "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8",
            "uint16", "uint32", "uint64", "bool", "complex32", "complex64", "complex128",
            "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
        )
    }
    | {
        f"{module}.{kind}"
        for module in ("builtins", "__builtin__")
        for kind in (
            "bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list",
            "set", "slice", "str", "tuple",
        )
    }
)  # fmt: skip
"""Known by module and name."""

CLASSES: Mapping[str, Collection[str]] = {
    "deepspeed": {
        "CurriculumScheduler", "DynamicLossScaler", "LossScaler", "LossScalerBase",
        "ZeroStageEnum", "fragment_address",
    },
    "megatron": {
        "MCoreMetadata", "MCoreSavePlan", "RerunDiagnostic", "RerunMode", "RerunState",
        "OptimizerConfig", "AttnBackend", "CudaGraphModule", "CudaGraphScope",
        "InferenceCudaGraphScope",
        "AttnMaskType", "AttnType", "LayerType", "ModelType", "PositionEmbeddingType",
    },
    "metaseq": {"AtomicArray", "LockingArray"},
    "olmo_core": {"_StorageInfo"},
    "torch": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "SavePlan",
        "StorageMeta", "TensorProperties", "TensorStorageMetadata", "TensorWriteData", "WriteItem",
        "WriteItemType", "_MEM_FORMAT_ENCODING", "_StorageInfo", "_StoragePrefix", "_get_layout",
        "DTensor", "DTensorSpec", "DeviceMesh", "Partial", "Replicate", "Shard", "ShardOrderEntry",
        "TensorMeta", "_FlatLayout", "_MeshLayout", "_StridedShard",
    },
    # The layers of 53 models of 8.4.190. The models themselves (`ultralytics.nn.tasks`) are not
    # among them: one that is called with a text for its activation evaluates it.
    "ultralytics": {
        "A2C2f", "AAttn", "ABlock", "AConv", "ADown", "Attention", "Bottleneck", "C2", "C2PSA",
        "C2f", "C2fCIB", "C3", "C3Ghost", "C3k", "C3k2", "CBFuse", "CBLinear", "CIB", "Classify",
        "Concat", "Conv", "DFL", "DWConv", "DeformableTransformerDecoder",
        "DeformableTransformerDecoderLayer", "Depth", "Detect", "ELAN1", "GhostBottleneck",
        "GhostConv", "MLP", "MSDeformAttn", "OBB", "OBB26", "PSA", "PSABlock", "Pose", "Pose26",
        "Proto", "Proto26", "RTDETRDecoder", "RealNVP", "RepBottleneck", "RepCSP", "RepConv",
        "RepNCSPELAN4", "RepVGGDW", "ResNetBlock", "ResNetLayer", "SCDown", "SPP", "SPPELAN",
        "SPPF", "Segment", "Segment26", "SemanticSegment", "v10Detect",
    },
}  # fmt: skip
"""Known by package and class: the modules inside have changed from version to version."""


ENUMS = frozenset(
    {
        "ZeroStageEnum", "RerunDiagnostic", "RerunMode", "RerunState", "AttnBackend",
        "CudaGraphModule", "CudaGraphScope", "InferenceCudaGraphScope",
        "AttnMaskType", "AttnType", "LayerType", "ModelType", "PositionEmbeddingType",
        "WriteItemType", "_MEM_FORMAT_ENCODING", "Signals", "LMONorm", "PreConditionerType",
    }
)  # fmt: skip
"""Those of them whose members are saved, by some releases of Python as `module.Class.member`."""


def is_known(name: str) -> bool:
    """Whether `module.name` is one that a trainer, torch or numpy puts into a shard, or a member of
    such an enum."""
    owner, _, member = name.rpartition(".")
    is_member = owner.rpartition(".")[2] in ENUMS and not member.startswith("_")
    return _is_known(name) or (is_member and _is_known(owner))


def _is_known(name: str) -> bool:
    package, _, rest = name.partition(".")
    return name in EXACT or rest.rpartition(".")[2] in CLASSES.get(package, ())


def unknown(names: Iterable[str], allowed: Collection[str] = ()) -> list[str]:
    """Those of `names` that are neither known nor allowed, sorted."""
    return sorted(name for name in set(names) if name not in allowed and not is_known(name))


def notes(globals: Mapping[str, Iterable[str]]) -> list[str]:
    """One sentence for each shard of `globals` (file → `module.name`s) with an unknown one."""
    return [
        f"{file} names {_shown(others)}, not known to be harmless"
        for file, names in globals.items()
        if (others := unknown(names))
    ]


def refuse_unknown(globals: Mapping[str, Iterable[str]], allowed: Collection[str] = ()) -> None:
    """Raise SurgeryError when a shard of `globals` (file → `module.name`s) names one that is
    unknown: written, it would be handed to the trainer, which imports and calls it."""
    for file, names in globals.items():
        others = unknown(names, allowed)
        if others:
            allow = [word for name in others for word in ("--allow-global", name)]
            raise SurgeryError(
                f"{file} names {_shown(others)}, not known to be harmless: a trainer that loads "
                "the shard imports it and may call it",
                next=[
                    "find out where the file comes from; do not load it",
                    again(*allow, why="if your own trainer saves all of them"),
                ],
            )


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
