"""A recipe is read strictly."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptsurgeon import operations
from ckptsurgeon.errors import UsageError
from ckptsurgeon.operations.fields import names
from ckptsurgeon.operations.hyperparameters import Hyperparameters
from ckptsurgeon.operations.skip import ranges
from ckptsurgeon.recipe.file import from_data, load, to_data


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("set: {lr: 1, lr: 2}", "write each key once"),
        ("set:\n\tlr: 1", "indent with spaces, not with tabs"),
        ("set: {lr: 1}\n---\nset: {lr: 2}", "keep one document in a file, without ---"),
        ("set: {lr: 1", "close each { and ["),
        ("set: {LR: 1}", "did you mean `set.lr`?"),
        ("reset: [moment]", "did you mean `moments`?"),
        ("set: {decay_style: exponential}", "one of: constant, linear, cosine"),
    ],
)
def test_the_remedy_fits_the_mistake(tmp_path: Path, text: str, fix: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        load(file)
    assert caught.value.next == (fix,)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("set: {lrr: 1}", "unknown key `set.lrr`"),
        ("rolback: {to: 5}", "unknown key `rolback`"),
        ("lr: 3e-5", "unknown key `lr`"),
        ("set: {lr: fast}", "`set.lr` is 'fast'"),
        ("set: {lr: .nan}", "`set.lr` is nan"),
        ("set: {lr: true}", "`set.lr` is True"),
        ("set: {lr: -1}", "`set.lr` is -1"),
        ("set: {lr: 100.5}", "`set.lr` is 100.5"),
        ("set: {eps: 1e7}", "`set.eps` is 1"),
        ("set_params: {params: norm, weight_decay: 1e99}", "`set_params.weight_decay` is 1e+99"),
        ("set: {beta2: 1.0}", "`set.beta2` is 1.0"),
        ("set: {beta2: 0.5x}", "`set.beta2` is '0.5x'"),
        ("set: {eps: 0}", "`set.eps` is 0"),
        ("set: {seed: 1.5}", "`set.seed` is 1.5"),
        ("set: {seed: 4294967296}", "`set.seed` is 4294967296"),
        ("set: {consumed_samples: 99999999999999999999}", "`set.consumed_samples` is 9999"),
        ("skip: [99999999999999999999]", "is too large"),
        ("tensorboard: {after: -1}", "`tensorboard.after` is -1"),
        ("set: {decay_style: exponential}", "exponential"),
        ("rollback: {to: latest}", "`rollback.to` is 'latest'"),
        ("rollback: {}", "`rollback.to` is missing"),
        ("rollback: 6210", "`rollback` must be a mapping"),
        ("rollback: {to: 3}\nrepair_latest: {}", "combined with `repair_latest`"),
        ("reset: [moment]", "`reset` takes no 'moment'"),
        ("skip: [10-5]", "ends before it starts"),
        ("skip: [0-5]", "starts before iteration 1"),
        ("skip: [five]", "is not A-B"),
        ("version: 2", "version 2"),
        ("- rollback", "a recipe is a mapping"),
        ("0", "a recipe is a mapping"),
        ("--- 0.5", "a recipe is a mapping"),
        ("why: a: b", ":1: mapping values are not allowed"),
        ("set: {lr: 1}\nset: {lr: 2}", "duplicate key"),
        ("why: &x text\nname: *x", ":1: anchors and aliases are refused"),
        ("why: !!python/object:os.system x", ":1: tag"),
        ("why: ${oc.env:HOME}", "is never expanded"),
        ("why: " + "[" * 40 + "]" * 40, "nested deeper"),
        ("why: [1, 2", "expected"),
        ("tensorboard: {rename: {a: 1}}", "`tensorboard.rename`"),
        ("tensorboard: {after: 5, order: size}", "`tensorboard.order` takes no 'size'"),
        (
            "tensorboard: {after: 5, axes: {loss: hours}}",
            "`tensorboard.axes.loss` takes no 'hours'",
        ),
        ("tensorboard: {after: -1}", "`tensorboard.after` is -1"),
        ("tensorboard: {after: 5, samples: -1}", "`tensorboard.samples` is -1"),
    ],
)
def test_what_can_not_be_meant_is_refused(tmp_path: Path, text: str, what: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        load(file)
    assert what in caught.value.what
    assert caught.value.next


def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    with pytest.raises(UsageError, match="No such file"):
        load(file)
    file.write_bytes(b"why: " + b"x" * 1_100_000)
    with pytest.raises(UsageError, match="more than 1000000"):
        load(file)
    file.write_bytes(b"why: \xff\xfe")
    with pytest.raises(UsageError, match="byte 5: not UTF-8"):
        load(file)


@pytest.mark.parametrize("text", ["3e-5", "3.0e-5", "0.00003", "+3E-05"])
def test_every_spelling_of_a_number_is_a_number(tmp_path: Path, text: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(f"set: {{lr: {text}}}")
    assert load(file)[Hyperparameters].lr == 3e-5
    assert from_data({}, [f"set.lr={text}"])[Hyperparameters].lr == 3e-5


def test_overrides_lie_over_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("rollback: {to: 50}\nset: {lr: 1e-3, beta1: 0.8}\n")
    recipe = load(file, ["rollback.to=60", "set.lr=2e-3", "skip=[5-6,9]"])
    assert to_data(recipe) == {
        "rollback": {"to": 60},
        "set": {"lr": 2e-3, "beta1": 0.8},
        "skip": ["5-6", "9"],
    }
    with pytest.raises(UsageError, match="is not KEY=VALUE"):
        load(file, ["rollback"])


def test_a_recipe_survives_its_own_text() -> None:
    data = {"why": "x: y", "set": {"lr": "0.5x"}, "reset": ["moments"], "clear_skip": True}
    assert to_data(from_data(to_data(from_data(data)))) == data


def test_a_scale_becomes_absolute_or_is_refused() -> None:
    wanted = from_data({"set": {"lr": "0.5x", "eps": 1e-6}})[Hyperparameters]
    assert wanted.scaled({"lr": 3e-4}).lr == 1.5e-4
    assert wanted.scaled({"lr": 3e-4}).eps == 1e-6
    with pytest.raises(UsageError, match="keeps no single lr"):
        wanted.scaled({"lr": None})


def test_ranges_are_inclusive_and_count_from_one() -> None:
    assert ranges(["6900-7010", " 5 ", "1 - 2"]) == [(6900, 7010), (5, 5), (1, 2)]


def test_a_key_without_a_value_is_refused_and_never_left_out(tmp_path: Path) -> None:
    """`lr:` above a `beta2:` that is done would be half of what was meant."""
    file = tmp_path / "recipe.yaml"
    for kind in operations.kinds():
        for name in names(kind) if kind.key else ():
            file.write_text(f"{kind.key}:\n  {name}:\n")
            with pytest.raises(UsageError, match=rf"`{kind.key}\.{name}` has no value"):
                load(file)
    file.write_text("set:\n  lr:\n  beta2: 0.9\n")
    with pytest.raises(UsageError, match="lr` has no value"):
        load(file)
    file.write_text("scale: {params: x, qk_clip: {threshold: }}\n")
    with pytest.raises(UsageError, match="threshold` has no value"):
        load(file)
