"""The model's options: what they compute, how they start, how many parameters they have."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from train.attention import attend, attention_scores
from train.config import Config
from train.model import GPT
from train.parameter_count import by_formula, counted_line, shape_warnings


def config(**options: object) -> Config:
    return Config(save="run", data="data", **options)  # type: ignore[arg-type]


def counted(options: Config) -> int:
    return sum(p.numel() for p in GPT(options).parameters())


def test_scores_that_overflow_fp16_are_finite_in_the_stable_form() -> None:
    """|q| = |k| = 36 in 64 dimensions: 36 x 36 x 64 = 82944 > 65504, and / sqrt(64) = 10368."""
    query = torch.full((1, 1, 2, 64), 36.0, dtype=torch.float16)
    assert attention_scores(query, query, stable=False).isinf().all()
    assert (attention_scores(query, query, stable=True) == 10368).all()


@pytest.mark.parametrize("form", ["plain", "stable"])
def test_explicit_scores_give_torchs_attention(form: str) -> None:
    torch.manual_seed(1)
    query, key, value = torch.randn(3, 2, 4, 9, 16, dtype=torch.float64)
    wanted = attend(query, key, value, "sdpa", 0.0)
    # The softmax runs in fp32.
    torch.testing.assert_close(attend(query, key, value, form, 0.0), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "std"),
    [("small_init", math.sqrt(2 / (5 * 128))), ("mt_nlg", math.sqrt(1 / (3 * 128))), (0.01, 0.01)],
)
def test_the_init_formulas_are_those_of_the_papers(method: float | str, std: float) -> None:
    torch.manual_seed(1)
    model = GPT(config(init_method_std=method, hidden_size=128, num_layers=8))
    block = model.layers[0]
    assert float(block.query_key_value.weight.detach().std()) == pytest.approx(std, rel=0.02)
    assert float(model.word_embeddings.weight.detach().std()) == pytest.approx(std, rel=0.02)
    for layer in (block.dense, block.dense_4h_to_h):  # those that write to the residual stream
        assert float(layer.weight.detach().std()) == pytest.approx(std / math.sqrt(16), rel=0.02)


def test_bigsciences_std_is_the_formula() -> None:
    assert config(hidden_size=11600).init_std == pytest.approx(0.00587220219514703)


def test_sinusoidal_positions_are_those_of_the_transformer() -> None:
    weight = GPT(config(position_init="sinusoidal")).position_embeddings.weight
    for position, column in ((0, 0), (0, 1), (7, 4), (31, 31)):
        angle = position / 10000 ** (2 * (column // 2) / 32)
        wanted = math.cos(angle) if column % 2 else math.sin(angle)
        assert float(weight[position, column].detach()) == pytest.approx(wanted, abs=1e-5)


def hidden(model: GPT) -> Tensor:
    seen: list[Tensor] = []
    model.layers[0].register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    tokens = torch.arange(32)[None]
    model(tokens, tokens)
    return seen[0].detach()


def test_the_embedding_layernorm_makes_the_scale_of_the_embeddings_irrelevant() -> None:
    model = GPT(config(embed_layernorm=True)).eval()
    before = hidden(model)
    with torch.no_grad():
        model.word_embeddings.weight.mul_(1000)
    torch.testing.assert_close(hidden(model), before, rtol=1e-3, atol=1e-3)


def test_relu_is_relu() -> None:
    block = GPT(config(activation_fn="relu")).layers[0]
    x, bias = torch.tensor([-3.0, -1.0, 1.0]), torch.ones(())
    assert block._activate(x, bias).tolist() == [0.0, 0.0, 2.0]


@pytest.mark.parametrize("key", ["hidden_dropout", "attention_dropout"])
def test_dropout_drops_in_training_only(key: str) -> None:
    model, tokens = GPT(config(**{key: 0.5})), torch.arange(32)[None]
    losses = {float(model(tokens, tokens).detach()) for _ in range(3)}
    assert len(losses) == 3
    assert len({float(model.eval()(tokens, tokens).detach()) for _ in range(3)}) == 1


def test_the_count_is_that_of_the_formula() -> None:
    options = config(num_layers=3, vocab_size=300)
    assert counted(options) == by_formula(options)
    assert shape_warnings(options, counted(options)) == []


def test_the_formula_gives_the_104b_of_experiment_6_and_counts_its_lopsided_58b() -> None:
    """tr8-104B-wide chronicles: 32 layers of 16384, and the FFN that was left at 13B's 20480."""
    shape = {
        "num_layers": 32, "hidden_size": 16384, "seq_length": 2048, "vocab_size": 50257,
        "num_attention_heads": 32,
    }  # fmt: skip
    right, lopsided = config(**shape), config(**shape, ffn_hidden_size=20480)
    assert round(by_formula(right) / 1e9) == 104
    with torch.device("meta"):
        model = GPT(lopsided)
    number = sum(p.numel() for p in model.parameters())
    assert round(number / 1e9) == 57  # "58B"
    assert str(by_formula(lopsided)) in counted_line(lopsided, number)
    ffn, count = shape_warnings(lopsided, number)
    assert "20480, not 4 x hidden_size = 65536" in ffn
    assert f"ffn_hidden_size 20480 {number - by_formula(right)}" in count


def test_every_cause_of_another_count_is_named() -> None:
    options = config(ffn_hidden_size=100, embed_layernorm=True, untie_embeddings=True)
    (_, count) = shape_warnings(options, counted(options))
    assert "ffn_hidden_size 100 -3640, untie_embeddings +8192, embed_layernorm +64" in count
    assert "unexplained" not in count
    assert "unexplained +5" in shape_warnings(options, counted(options) + 5)[1]
