"""The trainer's config: one flat structured dataclass, read from YAML and overrides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional, Union  # OmegaConf evaluates these annotations, on 3.10 as well

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .blend import resolved
from .curriculum import Curriculum, check_curriculum
from .errors import UsageError

RUN_CONFIG = "train.yaml"
PATHS = ("save", "data", "kill_switch_path")
HEADER = "# The resolved config of the run in this folder; the folder of this file is its `save`.\n"
DECAY_STYLES = ("linear", "cosine", "1-sqrt", "WSD", "constant")
WSD_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")
OPTIMIZERS = ("adamw", "sgdw", "lamb", "adamw8bit")
FUSED = ("auto", "always", "never")  # of the optimizer, and of the layers' kernels
DTYPES = ("fp32", "bf16", "fp16")
GRADIENT_DTYPES = ("auto", "fp32", "bf16")
ACTIVATIONS = ("gelu", "relu")
ATTENTIONS = ("sdpa", "plain", "stable")
POSITION_INITS = ("gaussian", "sinusoidal")
POSITIONS = ("learned_absolute", "alibi", "rope")
NORMALIZATIONS = ("LayerNorm", "RMSNorm")
INIT_FORMULAS = {"small_init": (2, 5), "mt_nlg": (1, 3), "fan_in": (1, 1)}
"""Name → (a, b) of the standard deviation sqrt(a / (b hidden_size)): Nguyen & Salazar 2019
("Transformers without Tears"); Smith et al. 2022 (Megatron-Turing NLG 530B); with fan_in each
matrix has the width of its own input in place of hidden_size (LeCun et al. 1998)."""


@dataclass
class Config:
    """Everything that a run needs. Names follow Megatron; *_samples count samples, iterations
    are 1-based and ranges [a, b] include both ends."""

    save: str = MISSING  # the run's root: checkpoints, pointers, tensorboard/
    data: str = MISSING  # prefix of the .bin/.idx pair, or WEIGHT PREFIX WEIGHT PREFIX …

    num_layers: int = 2
    hidden_size: int = 32
    num_attention_heads: int = 2
    seq_length: int = 32
    vocab_size: int = 256
    make_vocab_size_divisible_by: int = 128
    untie_embeddings: bool = False
    ffn_hidden_size: Optional[int] = None  # default 4 hidden_size  # noqa: UP045
    # Or mt_nlg, fan_in, or a number; the configs of older runs hold null, which is small_init.
    init_method_std: Optional[Union[float, str]] = "small_init"  # noqa: UP007, UP045
    position_init: str = "gaussian"  # of the learned positions; or sinusoidal
    position_embedding_type: str = "learned_absolute"  # or alibi, rope
    rotary_base: float = 10000.0  # of rope
    embed_layernorm: bool = False
    scale_embeddings: bool = False  # word vectors times sqrt(hidden_size)
    normalization: str = "LayerNorm"  # or RMSNorm
    num_query_groups: Optional[int] = None  # heads of keys; null: each its own  # noqa: UP045
    normformer: bool = False  # three more norms in each layer
    swiglu: bool = False  # silu(gate) x up in place of activation_fn
    add_bias_linear: bool = True
    layernorm_epsilon: float = 1e-5
    activation_fn: str = "gelu"
    attention: str = "sdpa"  # or the scores: plain, stable
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    embedding_dropout: Optional[float] = None  # null: hidden_dropout  # noqa: UP045
    tokenizer_type: str = "byte"
    eod_token: Optional[int] = None  # ends a document; of the byte tokenizer 0  # noqa: UP045
    reset_attention_mask: bool = False  # no token sees another document
    reset_position_ids: bool = False  # learned positions begin anew with each document

    lr: float = 1e-3
    min_lr: float = 0.0
    lr_decay_style: str = "linear"
    lr_warmup_samples: int = 0
    lr_decay_samples: Optional[int] = None  # default train_iters x global_batch_size  # noqa: UP045
    lr_wsd_decay_samples: Optional[int] = None  # of WSD, the last ones  # noqa: UP045
    lr_wsd_decay_style: str = "exponential"  # of WSD
    optimizer: str = "adamw"
    fused_optimizer: str = "auto"  # adamw in one pass: `auto`: where the kernels are native
    sgd_momentum: float = 0.9  # of sgdw
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    weight_decay: float = 0.1
    clip_grad: float = 1.0  # 0 turns clipping off
    skip_grad_norm: float = 0.0  # steps with a larger norm are left out; 0: none

    global_batch_size: int = 8
    micro_batch_size: int = 8
    rampup_batch_size: Optional[list[int]] = None  # start, increment, samples  # noqa: UP045

    train_iters: int = 100
    save_interval: int = 50
    async_save: bool = False  # write checkpoints beside training
    keep_last: Optional[int] = None  # checkpoints of this branch; null keeps all  # noqa: UP045
    log_interval: int = 1
    log_throughput: bool = False
    peak_tflops: Optional[float] = None  # of one device; null: known GPUs  # noqa: UP045
    profile: Optional[list[int]] = None  # iterations [a, b] of a trace  # noqa: UP045
    eval_interval: Optional[int] = None  # null: no validation  # noqa: UP045
    eval_iters: int = 10
    split: str = "1,0,0"  # shares of the documents for training, validation, test
    watchdog: Optional[float] = None  # minutes without progress; null: wait  # noqa: UP045
    kill_switch_path: Optional[str] = None  # save and exit once it is there  # noqa: UP045
    curriculum: Optional[Curriculum] = None  # noqa: UP045
    seed: int = 1234
    skip_train_iteration_range: list[list[int]] = field(default_factory=list)

    tensor_model_parallel_size: int = 1  # ranks that share each matrix
    pipeline_model_parallel_size: int = 1  # ranks that share the layers
    checkpoint_activations: bool = False  # recompute each layer's activations in the backward pass
    zero_stage: int = 1
    dtype: str = "fp32"
    # In which gradients of bf16 add up and are reduced; auto: fp32 with ZeRO, or as the checkpoint.
    grad_accum_dtype: str = "auto"
    overlap_comm: Optional[bool] = None  # ZeRO 1 and 2; null: on GPUs  # noqa: UP045
    threads: int = 1  # torch threads per rank
    kernels: str = "auto"  # of the layers; `auto`: where they are measured to be faster
    compile: bool = False  # torch.compile fuses the model instead of our kernels; slow to start
    # fp16: a static scale, or DeepSpeed's dynamic one.
    loss_scale: Optional[float] = None  # noqa: UP045
    initial_loss_scale: float = 65536.0
    min_loss_scale: int = 1
    loss_scale_window: int = 1000
    hysteresis: int = 2
    gradient_predivide_factor: float = 1.0

    # For demos and tests: the targets of iterations a..b are replaced by random bytes 128-255.
    poison: Optional[list[int]] = None  # noqa: UP045

    @property
    def padded_vocab_size(self) -> int:
        return (
            math.ceil(self.vocab_size / self.make_vocab_size_divisible_by)
            * self.make_vocab_size_divisible_by
        )

    @property
    def shares(self) -> list[float]:
        """The numbers of `split`; empty when it is none."""
        try:
            return [float(share) for share in self.split.split(",")]
        except ValueError:
            return []

    @property
    def init_std(self) -> float:
        std = "small_init" if self.init_method_std is None else self.init_method_std
        if isinstance(std, str):
            a, b = INIT_FORMULAS[std]
            return math.sqrt(a / (b * self.hidden_size))
        return std

    def init_std_of(self, width: int) -> float:
        """Of a matrix whose input is so wide."""
        return width**-0.5 if self.init_method_std == "fan_in" else self.init_std

    @property
    def ffn_size(self) -> int:
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size

    @property
    def query_groups(self) -> int:
        """The heads of keys and values."""
        return self.num_attention_heads if self.num_query_groups is None else self.num_query_groups

    @property
    def dropout_of_embeddings(self) -> float:
        return self.hidden_dropout if self.embedding_dropout is None else self.embedding_dropout

    @property
    def decay_samples(self) -> int:
        if self.lr_decay_samples is not None:
            return self.lr_decay_samples
        return self.train_iters * self.global_batch_size


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read `path`, then `KEY=VALUE` overrides. Raises UsageError for anything that can't be meant.

    A file that the trainer wrote as <save>/train.yaml describes the run in whose folder it lies,
    so a moved or copied run trains in its own folder, never in the one it came from.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise UsageError(
            f"{path}: can't read the config: {e.strerror}", next="--config FILE that exists"
        ) from None
    malformed = [o for o in overrides if "=" not in o]
    if malformed:
        raise UsageError(f"{malformed[0]!r} is not KEY=VALUE", next="for example lr=0.001")
    try:
        loaded = OmegaConf.create(text)
        if not isinstance(loaded, DictConfig):
            raise UsageError(f"{path}: not a mapping of keys to values", next="KEY: VALUE lines")
        if text.startswith(HEADER):
            loaded["save"] = str(path.resolve().parent)
        # A path is taken as it is; as YAML it would end before ` #`.
        given = [(o, *o.split("=", 1)) for o in overrides]
        paths = {key: value for _, key, value in given if key in PATHS and value != "null"}
        others = [override for override, key, _ in given if key not in paths]
        merged = OmegaConf.merge(
            OmegaConf.structured(Config), loaded, OmegaConf.from_dotlist(others), paths
        )
        missing = sorted(str(key) for key in OmegaConf.missing_keys(merged))
        if missing:
            raise UsageError(
                f"{path}: {' and '.join(missing)} not set",
                next=" ".join(f"{key}=PATH" for key in missing),
            )
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as e:
        reason = str(e).splitlines()[0]
        raise UsageError(f"{path}: {reason}", next=f"keys: {', '.join(_keys())}") from None
    assert isinstance(config, Config)
    config.save = str(Path(config.save).expanduser().resolve())
    try:
        config.data = resolved(config.data)
    except ValueError:
        raise UsageError(
            f"data is {config.data!r}; each weight must be a number above 0",
            next="data=PREFIX, or 'data=0.7 PREFIX 0.3 PREFIX'",
        ) from None
    if config.kill_switch_path is not None:
        config.kill_switch_path = str(Path(config.kill_switch_path).expanduser().resolve())
    validate(config)
    return config


def dump_config(config: Config) -> str:
    """The resolved config as YAML, under the header by which `load_config` knows a run's file."""
    return HEADER + OmegaConf.to_yaml(OmegaConf.structured(config))


def validate(config: Config) -> None:
    """Refuse values that can't train, naming the key and the number."""
    c = config
    for key in (
        "num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size",
        "make_vocab_size_divisible_by", "global_batch_size", "micro_batch_size", "train_iters",
        "save_interval", "log_interval", "threads", "tensor_model_parallel_size",
        "pipeline_model_parallel_size", "min_loss_scale",
        "loss_scale_window", "hysteresis", "gradient_predivide_factor",
    ):  # fmt: skip
        _check(getattr(c, key) >= 1, key, getattr(c, key), "at least 1")
    for key in ("lr", "min_lr", "weight_decay", "clip_grad", "skip_grad_norm", "lr_warmup_samples"):
        value = getattr(c, key)
        _check(math.isfinite(value) and value >= 0, key, value, "a finite number, at least 0")
    for key in ("adam_beta1", "adam_beta2", "sgd_momentum", "hidden_dropout", "attention_dropout",
                "dropout_of_embeddings"):  # fmt: skip
        _check(0 <= getattr(c, key) < 1, key, getattr(c, key), "in [0, 1)")
    for key, allowed in (
        ("optimizer", OPTIMIZERS), ("activation_fn", ACTIVATIONS), ("attention", ATTENTIONS),
        ("position_init", POSITION_INITS), ("position_embedding_type", POSITIONS),
        ("normalization", NORMALIZATIONS),
    ):  # fmt: skip
        _check(getattr(c, key) in allowed, key, getattr(c, key), allowed)
    _check_init(c)
    groups = c.query_groups
    _check(groups >= 1 and c.num_attention_heads % groups == 0, "num_query_groups", groups,
           f"a divisor of num_attention_heads {c.num_attention_heads}")  # fmt: skip
    width = c.hidden_size // c.num_attention_heads
    _check(c.position_embedding_type != "rope" or width % 2 == 0, "hidden_size", c.hidden_size,
           "an even number for each head with rope")  # fmt: skip
    _check(c.rotary_base > 1, "rotary_base", c.rotary_base, "above 1")
    _check(c.loss_scale is None or c.loss_scale >= 1, "loss_scale", c.loss_scale,
           "at least 1, or null for the dynamic one")  # fmt: skip
    power = math.frexp(c.initial_loss_scale)[0] == 0.5 and c.initial_loss_scale >= c.min_loss_scale
    _check(power, "initial_loss_scale", c.initial_loss_scale,
           f"a power of 2, at least min_loss_scale {c.min_loss_scale}")  # fmt: skip
    _check(c.adam_eps > 0, "adam_eps", c.adam_eps, "above 0")
    _check(c.hidden_size % c.num_attention_heads == 0, "hidden_size", c.hidden_size,
           f"a multiple of num_attention_heads {c.num_attention_heads}")  # fmt: skip
    _check(c.min_lr <= c.lr, "min_lr", c.min_lr, f"at most lr {c.lr}")
    _check(c.lr_decay_style in DECAY_STYLES, "lr_decay_style", c.lr_decay_style, DECAY_STYLES)
    for key in ("fused_optimizer", "kernels"):
        _check(getattr(c, key) in FUSED, key, getattr(c, key), FUSED)
    _check(c.dtype in DTYPES, "dtype", c.dtype, DTYPES)
    _check(c.grad_accum_dtype in GRADIENT_DTYPES, "grad_accum_dtype", c.grad_accum_dtype,
           GRADIENT_DTYPES)  # fmt: skip
    _check(c.grad_accum_dtype == "auto" or c.dtype == "bf16", "grad_accum_dtype",
           f"{c.grad_accum_dtype} with dtype {c.dtype}", "auto there")  # fmt: skip
    _check(c.grad_accum_dtype != "fp32" or c.zero_stage > 0, "grad_accum_dtype",
           "fp32 with zero_stage 0", "auto or bf16 there: DeepSpeed has no other")  # fmt: skip
    _check(c.zero_stage in range(4), "zero_stage", c.zero_stage, (0, 1, 2, 3))
    _check(c.optimizer != "lamb" or c.zero_stage < 3, "optimizer", "lamb with zero_stage 3",
           "adamw or sgdw there: its flat slices tell no parameter's norm")  # fmt: skip
    _check_parallel(c)
    _check(0 <= c.seed < 2**32, "seed", c.seed, "in 0 … 2^32 - 1")
    if c.lr_decay_style != "constant":
        _check(c.lr_warmup_samples < c.decay_samples, "lr_warmup_samples", c.lr_warmup_samples,
               f"below lr_decay_samples {c.decay_samples}")  # fmt: skip
    _check_wsd(c)
    for index, pair in enumerate(c.skip_train_iteration_range):
        _check_range(f"skip_train_iteration_range[{index}]", pair)
    for key in ("poison", "profile"):
        if getattr(c, key) is not None:
            _check_range(key, getattr(c, key))
    _check(c.watchdog is None or c.watchdog > 0, "watchdog", c.watchdog,
           "above 0, or null to wait without a limit")  # fmt: skip
    _check(c.peak_tflops is None or c.peak_tflops > 0, "peak_tflops", c.peak_tflops, "above 0")
    if c.curriculum is not None:
        check_curriculum(c.curriculum, c.seq_length)
    _check_validation(c)


def _check_wsd(c: Config) -> None:
    length, stable = c.lr_wsd_decay_samples, c.decay_samples - c.lr_warmup_samples
    _check(c.lr_wsd_decay_style in WSD_STYLES, "lr_wsd_decay_style", c.lr_wsd_decay_style,
           WSD_STYLES)  # fmt: skip
    _check((length is None) == (c.lr_decay_style != "WSD"), "lr_wsd_decay_samples",
           f"{length} with lr_decay_style {c.lr_decay_style}",
           "set with WSD, and only with it")  # fmt: skip
    _check(length is None or 1 <= length <= stable, "lr_wsd_decay_samples", length,
           f"in 1 … {stable}, the samples from the warm-up to lr_decay_samples")  # fmt: skip


def _check_validation(c: Config) -> None:
    for key in ("keep_last", "eval_interval"):
        _check(getattr(c, key) is None or getattr(c, key) >= 1, key, getattr(c, key), "at least 1")
    _check(c.eval_iters >= 1, "eval_iters", c.eval_iters, "at least 1")
    shares = c.shares
    _check(len(shares) == 3 and min(shares) >= 0 and shares[0] > 0 and math.isfinite(sum(shares)),
           "split", c.split, "three shares such as 969,30,1, the first above 0")  # fmt: skip
    _check(c.eval_interval is None or shares[1] > 0, "split", c.split,
           "969,30,1 or alike with eval_interval: its second share is held out")  # fmt: skip


def _check_init(c: Config) -> None:
    std = "small_init" if c.init_method_std is None else c.init_method_std
    ok = std in INIT_FORMULAS if isinstance(std, str) else math.isfinite(std) and std > 0
    _check(ok, "init_method_std", std, ("a finite number above 0", *INIT_FORMULAS))
    ffn = c.ffn_hidden_size
    _check(ffn is None or ffn >= 1, "ffn_hidden_size", ffn, "at least 1, or null for 4 hidden_size")


def _check_parallel(c: Config) -> None:
    tensor, pipeline = c.tensor_model_parallel_size, c.pipeline_model_parallel_size
    for key in ("num_attention_heads", "query_groups", "padded_vocab_size", "ffn_size"):
        _check(getattr(c, key) % tensor == 0, key, getattr(c, key),
               f"a multiple of tensor_model_parallel_size {tensor}")  # fmt: skip
    for key in ("reset_attention_mask", "reset_position_ids"):
        if getattr(c, key):
            _check(pipeline == 1, key, True, "false with pipeline_model_parallel_size "
                   f"{pipeline}, whose later stages see no tokens")  # fmt: skip
            _check(c.eod_token is not None, "eod_token", None,
                   f"the token that ends a document with {key}")  # fmt: skip
    learned = c.position_embedding_type == "learned_absolute"
    _check(learned or not c.reset_position_ids, "reset_position_ids", True,
           f"false with {c.position_embedding_type}, which knows distances only")  # fmt: skip
    _check(pipeline <= c.num_layers, "pipeline_model_parallel_size", pipeline,
           f"at most num_layers {c.num_layers}")  # fmt: skip
    _check(tensor == 1 or not c.normformer, "normformer", True,
           f"false with tensor_model_parallel_size {tensor}, which cuts what it norms")  # fmt: skip
    # DeepSpeed's pipeline engine calls the layers itself, one by one.
    _check(pipeline == 1 or not c.compile, "compile", c.compile,
           f"false with pipeline_model_parallel_size {pipeline}")  # fmt: skip
    # DeepSpeed: "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism".
    _check(pipeline == 1 or c.zero_stage < 2, "zero_stage", c.zero_stage,
           f"0 or 1 with pipeline_model_parallel_size {pipeline}")  # fmt: skip
    # DeepSpeed's 16-bit wrapper of stage 0 counts only the first model rank in the gradient norm.
    _check(tensor * pipeline == 1 or c.zero_stage > 0 or c.dtype == "fp32", "zero_stage", 0,
           f"at least 1 with dtype {c.dtype} and model parallelism")  # fmt: skip


def _check_range(key: str, pair: list[int]) -> None:
    _check(len(pair) == 2 and 1 <= pair[0] <= pair[1], key, pair, "[a, b] with 1 <= a <= b")


def _check(ok: bool, key: str, value: object, must: object) -> None:
    if not ok:
        wanted = " or ".join(map(str, must)) if isinstance(must, tuple) else must
        raise UsageError(f"{key} is {value}; it must be {wanted}", next=f"change {key}")


def _keys() -> list[str]:
    return sorted(Config.__dataclass_fields__)
