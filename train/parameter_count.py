"""The number of parameters: counted, and by the formula of the 104B chronicles."""

from __future__ import annotations

from torch import nn

from .config import Config
from .grid import Grid
from .model import Head


def count(model: nn.Module, grid: Grid) -> tuple[int, int]:
    """All parameters, and those without embeddings and head (Megatron's `gigaflos without
    embeddings`), each once over all ranks that share a model; every rank must call it."""
    everything = without = 0
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            cut = grid.tensor_size if hasattr(parameter, "partition_dim") else 1
            if not getattr(parameter, "ds_pipe_replicated", False):
                everything += parameter.numel() * cut
                if not isinstance(module, (nn.Embedding, Head)):
                    without += parameter.numel() * cut
    return grid.sum_over_stages(everything), grid.sum_over_stages(without)


def by_formula(config: Config) -> int:
    """n (12 h² + 13 h) + v h + s h + 2 h, what the run is meant to have.

    h hidden size, n layers, s sequence length, v padded vocabulary. It assumes an FFN of 4 h, a
    tied head and no LayerNorm behind the embeddings (tr8-104B chronicles, experiment 6).
    """
    h = config.hidden_size
    embeddings = (config.padded_vocab_size + config.seq_length) * h
    return config.num_layers * (12 * h * h + 13 * h) + embeddings + 2 * h


def counted_line(config: Config, counted: int) -> str:
    """Both figures, for the log."""
    return f" parameters: {counted} counted, {by_formula(config)} by n(12h^2+13h)+vh+sh+2h"


def shape_warnings(config: Config, counted: int) -> list[str]:
    """One sentence for an FFN that was set, one when the count is not that of the formula."""
    warnings = []
    h, ffn = config.hidden_size, config.ffn_size
    if ffn != 4 * h:
        warnings.append(
            f"ffn_hidden_size is {ffn}, not 4 x hidden_size = {4 * h}: leave it out unless "
            "another shape is meant"
        )
    layers, bias = config.num_layers, int(config.add_bias_linear)
    mixed = h + 2 * config.query_groups * h // config.num_attention_heads
    up = ffn * (1 + config.swiglu)
    learned = config.position_embedding_type == "learned_absolute"
    causes = {
        f"num_query_groups {config.query_groups}": layers * (mixed - 3 * h) * (h + 1),
        "swiglu": layers * (up - ffn) * (h + 1),
        "no biases": -layers * (mixed + h + up + h) * (1 - bias),
        "RMSNorm": -(2 * layers + 1) * h * (config.normalization == "RMSNorm"),
        "normformer": layers
        * (config.num_attention_heads + (h + ffn) * (2 - (config.normalization == "RMSNorm")))
        * config.normformer,
        config.position_embedding_type: -config.seq_length * h * (not learned),
        f"ffn_hidden_size {ffn}": config.num_layers * (2 * h + 1) * (ffn - 4 * h),
        "untie_embeddings": config.padded_vocab_size * h * config.untie_embeddings,
        "embed_layernorm": 2 * h * config.embed_layernorm,
    }
    difference = counted - by_formula(config)
    if difference:
        named = [f"{cause} {share:+d}" for cause, share in causes.items() if share]
        unexplained = difference - sum(causes.values())
        named += [f"unexplained {unexplained:+d}"] if unexplained else []
        warnings.append(
            f"{counted} parameters, {difference:+d} against the formula's {by_formula(config)}: "
            + ", ".join(named)
        )
    return warnings
