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
from train.positions import (
    alibi_bias,
    alibi_slopes,
    document_bias,
    document_positions,
    rotate,
)


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


def test_each_matrix_can_start_by_the_width_of_its_own_input() -> None:
    torch.manual_seed(1)
    model = GPT(config(init_method_std="fan_in", hidden_size=128, ffn_hidden_size=512))
    block = model.layers[0]
    for weight, std in (
        (model.word_embeddings.weight, 128**-0.5),
        (block.query_key_value.weight, 128**-0.5),
        (block.dense.weight, 128**-0.5 / 2),  # of two layers, for the residual stream
        (block.dense_4h_to_h.weight, 512**-0.5 / 2),
    ):
        assert float(weight.detach().std()) == pytest.approx(std, rel=0.02)


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


def test_the_slopes_are_those_of_the_papers_code() -> None:
    """8 heads: 1/2 … 1/256; 112 heads, BLOOM's: the 64 of a power of 2, and every other of 128."""
    assert alibi_slopes(8) == [2.0**-n for n in range(1, 9)]
    bloom = alibi_slopes(112)
    assert len(bloom) == 112 and bloom[63] == 2.0**-8
    assert bloom[64:67] == pytest.approx([2 ** (-1 / 16), 2 ** (-3 / 16), 2 ** (-5 / 16)])


@pytest.mark.parametrize("form", ["sdpa", "plain", "stable"])
def test_alibi_takes_the_distance_times_the_slope_from_each_score(form: str) -> None:
    torch.manual_seed(1)
    query, key, value = torch.randn(3, 2, 4, 9, 16, dtype=torch.float64)
    bias = alibi_bias(tuple(alibi_slopes(4)), 9, (torch.float64, "cpu"))
    ours = attend(query, key, value, form, 0.0, bias)
    for head, slope in enumerate(alibi_slopes(4)):
        for i in range(9):
            scores = [
                query[0, head, i] @ key[0, head, j] / 4 - slope * (i - j) for j in range(i + 1)
            ]
            wanted = torch.stack(scores).softmax(0) @ value[0, head, : i + 1]
            torch.testing.assert_close(ours[0, head, i], wanted, rtol=1e-5, atol=1e-6)


def test_rotations_are_products_with_powers_of_unit_complex_numbers() -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 3, 7, 8)
    rates = 500.0 ** (-torch.arange(4) / 4)
    angles = torch.arange(7)[:, None] * rates
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones(7, 4), angles)
    wanted = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(rotate(x, 500.0), wanted)


def test_products_of_rotated_vectors_depend_on_their_distance_only() -> None:
    torch.manual_seed(1)
    query, key = torch.randn(2, 8)
    q, k = (rotate(x.expand(20, 8), 10000.0) for x in (query, key))
    products = q @ k.T
    for distance in (0, 3, 11):
        along = torch.diagonal(products, -distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["sdpa", "plain"])
def test_each_key_serves_its_group_of_heads(form: str) -> None:
    torch.manual_seed(1)
    query, key, value = torch.randn(2, 6, 5, 4), torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4)
    ours = attend(query, key, value, form, 0.0)
    for head in range(6):
        alone = [part[:, head // 2 : head // 2 + 1] for part in (key, value)]
        wanted = attend(query[:, head : head + 1], *alone, form, 0.0)
        torch.testing.assert_close(ours[:, head : head + 1], wanted)


LLAMA = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True,
    "add_bias_linear": False, "num_query_groups": 2, "num_attention_heads": 4,
    "ffn_hidden_size": 48, "untie_embeddings": True,
}  # fmt: skip


def test_a_block_of_llamas_shape_is_its_formula() -> None:
    """Touvron et al. 2023: x + attention(rms(x)), then x + W2 (silu(W1 rms(x)) * W3 rms(x))."""
    torch.manual_seed(1)
    block = GPT(config(**LLAMA)).double().eval().layers[0]
    x = torch.randn(2, 9, 32, dtype=torch.float64)

    def rms(t: Tensor) -> Tensor:
        return t / (t.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    rows = block.query_key_value.weight.view(2, 4, 8, 32)  # groups, (two queries, key, value)
    mixed = torch.einsum("bsh,gndh->bgnsd", rms(x), rows)
    query, key, value = mixed[:, :, :2].flatten(1, 2), mixed[:, :, 2], mixed[:, :, 3]
    key, value = (part.repeat_interleave(2, 1) for part in (rotate(key, 10000.0), value))
    scores = rotate(query, 10000.0) @ key.transpose(-1, -2) / math.sqrt(8)
    future = torch.ones(9, 9, dtype=torch.bool).triu(1)
    context = scores.masked_fill(future, -math.inf).softmax(-1) @ value
    middle = x + context.transpose(1, 2).flatten(2) @ block.dense.weight.T
    gate, up = (
        rms(middle) @ part.T for part in block.dense_h_to_4h.weight.view(48, 2, 32).unbind(1)
    )
    wanted = middle + (torch.nn.functional.silu(gate) * up) @ block.dense_4h_to_h.weight.T
    torch.testing.assert_close(block(x), wanted, rtol=1e-5, atol=1e-6)


def test_embeddings_are_scaled_and_dropped_on_their_own() -> None:
    plain = GPT(config(position_embedding_type="rope")).eval()
    scaled = GPT(config(position_embedding_type="rope", scale_embeddings=True)).eval()
    torch.testing.assert_close(hidden(scaled), hidden(plain) * math.sqrt(32))
    dropped = hidden(GPT(config(embedding_dropout=0.5)))
    assert 0.3 < float((dropped == 0).float().mean()) < 0.7
    assert not (hidden(GPT(config(embedding_dropout=0.0, hidden_dropout=0.5))) == 0).any()


@pytest.mark.parametrize(
    "options",
    [
        LLAMA,
        {"position_embedding_type": "alibi", "embed_layernorm": True},
        {"normformer": True},
        {**LLAMA, "normformer": True},
    ],
)
def test_the_count_of_every_shape_is_explained(options: dict[str, object]) -> None:
    made = config(**options)
    warnings = shape_warnings(made, counted(made))
    assert warnings and not any("unexplained" in warning for warning in warnings)


def test_normformer_is_its_formula() -> None:
    """Shleifer et al. 2021, equations 1 to 4, in the names of the paper."""
    torch.manual_seed(1)
    block = GPT(config(normformer=True)).double().eval().layers[0]
    with torch.no_grad():
        block.head_scale.copy_(torch.tensor([0.5, 2.0]))
        for norm in (block.attention_layernorm, block.ffn_layernorm):
            norm.weight.mul_(torch.linspace(0.5, 2.0, len(norm.weight)))
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    mixed = block.query_key_value(block.input_layernorm(x)).view(2, 9, 2, 48).transpose(1, 2)
    heads = attend(*mixed.chunk(3, -1), "sdpa", 0.0) * torch.tensor([0.5, 2.0]).view(2, 1, 1)
    attention = block.dense(heads.transpose(1, 2).flatten(2))
    middle = x + block.attention_layernorm(attention)
    up = block.dense_h_to_4h(block.post_attention_layernorm(middle))
    up = block.ffn_layernorm(torch.nn.functional.gelu(up, approximate="tanh"))
    torch.testing.assert_close(block(x), middle + block.dense_4h_to_h(up))


DOCUMENTS = [5, 9, 0, 3, 7, 4, 0, 8, 2, 6]  # three, of 3, 4 and 3 tokens; 0 ends one


def test_positions_count_from_the_begin_of_a_document() -> None:
    tokens = torch.tensor([DOCUMENTS, [0, 0, *DOCUMENTS[2:]]])
    assert document_positions(tokens, eod=0).tolist() == [
        [0, 1, 2, 0, 1, 2, 3, 0, 1, 2],
        [0, 0, 0, 0, 1, 2, 3, 0, 1, 2],
    ]


def test_a_token_sees_its_own_document_alone() -> None:
    bias = document_bias(torch.tensor([DOCUMENTS]), 0, torch.float32)
    assert bias.shape == (1, 1, 10, 10)
    ones = [torch.ones(n, n).tril() for n in (3, 4, 3)]
    assert torch.equal(bias[0, 0] == 0, torch.block_diag(*ones) == 1)
    assert float(bias.max()) == 0 and bias[bias != 0].isinf().all()


@pytest.mark.parametrize("attention", ["sdpa", "plain", "stable"])
@pytest.mark.parametrize("positions", ["learned_absolute", "alibi", "rope"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.long
def test_documents_in_one_sample_are_as_if_alone(
    attention: str, positions: str, recompute: bool
) -> None:
    own = {
        "position_embedding_type": positions, "attention": attention, "init_method_std": 0.5,
        "checkpoint_activations": recompute, "num_query_groups": 1,
    }  # fmt: skip
    learned = positions == "learned_absolute"
    reset = {"reset_attention_mask": True, "reset_position_ids": learned, "eod_token": 0}
    together, alone = GPT(config(**own, **reset)), GPT(config(**own))
    tokens, targets = torch.tensor([DOCUMENTS]), torch.arange(10)[None]
    loss = together(tokens, targets)
    parts = [alone(tokens[:, a:b], targets[:, a:b]) * (b - a) for a, b in ((0, 3), (3, 7), (7, 10))]
    torch.testing.assert_close(loss, sum(parts) / 10)
    assert not torch.isclose(loss, alone(tokens, targets), rtol=1e-3)
    loss.backward()
    (sum(parts) / 10).backward()
    for ours, theirs in zip(together.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
