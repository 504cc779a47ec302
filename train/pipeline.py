"""The model as a pipeline: layers shared out over stages, each micro-batch passed from one to the
next by DeepSpeed's PipelineEngine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn

from .config import Config
from .grid import Grid
from .model import (
    Block,
    Head,
    WordEmbedding,
    embedded_class,
    language_model_loss,
    normalization_class,
)

Outputs = tuple[Tensor, Tensor]
MicroBatch = tuple[Tensor, Tensor]


class EmbeddingPipe(nn.Module):
    """The first layer, and the last one of a tied model."""

    def __init__(self, config: Config, grid: Grid) -> None:
        super().__init__()
        self.word_embeddings = WordEmbedding(config, grid)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.as_tensor(self.word_embeddings(tokens))


class HeadPipe(nn.Module):
    """The last layer of an untied model."""

    def __init__(self, config: Config, grid: Grid) -> None:
        super().__init__()
        self.head = Head(config, grid)

    def forward(self, x: Tensor) -> Outputs:
        return hand_over(self.head.weight, x)


def reuse_embedding(embedding: EmbeddingPipe, x: Tensor) -> Outputs:
    """The forward pass of a tied last layer."""
    return hand_over(embedding.word_embeddings.weight, x)


def hand_over(matrix: Tensor, x: Tensor) -> Outputs:
    """x with the output matrix, as the outputs of the last stage.

    The loss multiplies the two. It can't take the matrix from the module: DeepSpeed divides the
    gradients of a stage's outputs by the number of micro-batches, and nothing else."""
    return x, matrix.view_as(matrix)


def build_pipeline(config: Config, grid: Grid) -> PipelineModule:
    """This rank's stage of the GPT of `train.model`, with the same weights at the start.

    Blocks are shared out evenly; the embeddings go to the first stage, the final LayerNorm and
    the output matrix to the last one, where a tied matrix is a copy kept equal."""

    def loss(outputs: Outputs, targets: Tensor) -> Tensor:
        x, matrix = outputs
        return language_model_loss(x, matrix, targets, grid)

    tied = {"tied_weight_attr": "word_embeddings.weight"}
    first = TiedLayerSpec("embed", EmbeddingPipe, config, grid, **tied)
    last = TiedLayerSpec("embed", EmbeddingPipe, config, grid, forward_fn=reuse_embedding, **tied)
    if config.untie_embeddings:
        first, last = LayerSpec(EmbeddingPipe, config, grid), LayerSpec(HeadPipe, config, grid)
    layers = [
        first,
        LayerSpec(embedded_class(config), config, grid),
        *(LayerSpec(Block, config, grid, number) for number in range(config.num_layers)),
        LayerSpec(normalization_class(config), config.hidden_size, eps=config.layernorm_epsilon),
        last,
    ]
    module = PipelineModule(
        layers, topology=grid.mpu.topology(), loss_fn=loss, partition_method="type:^Block$"
    )
    for parameter in module.parameters():
        # DeepSpeed asks this of each parameter before it counts its gradient in the norm.
        parameter.model_parallel = grid.counts(parameter)
    return module


def final_norm(stage: Any, grid: Grid) -> Any:
    """The norm behind the last layer, None on a stage that has it not."""
    last = grid.pipeline_rank == grid.pipeline_size - 1
    return stage.forward_funcs[-2] if last else None  # before the output matrix


def saved_layers(num_layers: int, untied: bool) -> range:
    """The numbers of the layers that have a file; a tied head is saved once, as layer 0."""
    return range(num_layers + 3 + untied)


def train_batch(
    engine: Any,
    micro_batches: Iterable[MicroBatch],
    before_forward: Callable[[int], None],
    before_step: Callable[[], None],
    lr_kwargs: dict[str, Any],
) -> Tensor:
    """Train on one global batch and return its mean loss, on every stage.

    `before_forward` is called on every stage with the number of each micro-batch, `before_step`
    when the gradients are complete; the scheduler steps with `lr_kwargs`, which DeepSpeed's own
    pipeline can't pass on."""
    take = type(engine)._take_model_step

    def take_model_step(_: Any) -> None:
        before_step()
        take(engine, lr_kwargs)

    engine._take_model_step = take_model_step
    numbers = itertools.count()
    hook = engine.module.register_forward_pre_hook(lambda *_: before_forward(next(numbers)))
    try:
        return torch.as_tensor(engine.train_batch(data_iter=iter(micro_batches)))
    finally:
        hook.remove()
