"""The map of a transplant says what its plan would do, and each refusal at which it would stop."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptsurgeon import Run, plan
from ckptsurgeon.errors import SurgeryError, first_few
from ckptsurgeon.files.dtypes import ITEM_BYTES
from ckptsurgeon.operations.transplant import Transplant
from ckptsurgeon.operations.transplant_map import ParameterMap
from ckptsurgeon.plans.edits import Computed
from ckptsurgeon.recipe.file import from_data
from tests.cli.conftest import invoke
from tests.support.deepspeed_engine import Options, launched, make, process_group
from tests.support.snapshot import exact_snapshot

MODELS = ("fused", "apart", "words", "more words", "deeper", "plain", "wide")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of each model a run of one step; of the fused one also on two ranks."""
    folder = tmp_path_factory.mktemp("models")
    with process_group():
        for model in MODELS:
            make(folder / model, Options(stage=1, model=model), 1)
        for name in ("numbered", "numbers"):
            make(folder / name, Options(stage=0, model="plain"), 1)
        launched("make", folder / "two ranks", Options(stage=2, model="fused"), 2, 1)
        yield folder


def mapped(run: Path, source: Path, **more: Any) -> ParameterMap:
    opened = Run.open(run)
    section = Transplant.build({"source": str(source), **more})
    made: ParameterMap = section.parameters(opened, opened.checkpoint(opened.latest()))
    return made


RULES: list[dict[str, Any]] = [
    {"rename": {"both.weight": "one.weight"}},
    {"rename": {"both.{rest}": "two.{rest}"}},
    {"rename": {"out.weight": "elsewhere"}},
    {"rename": {"out.bias": "one.bias"}},
    {"split": {"both.weight": ["one.weight", "two.weight"]}},
    {"split": {"both.{rest}": ["one.{rest}", "two.{rest}"]}},
    {"split": {"both.bias": ["one.bias", "two.bias", "three.bias"]}},
    {"fuse": {"one.weight": ["both.weight", "nowhere.weight"]}},
    {"groups": {"both.weight": 4}},
    {"groups": {"both.weight": 3}},
    {"halves_to_pairs": {"one.weight": 2}},
    {"halves_to_pairs": {"one.weight": 3}},
    {"pairs_to_halves": {"two.weight": 2}},
    {"pairs_to_halves": {"one.weight": "heads"}},
    {"transpose": ["both.weight"]},
    {"transpose": ["out.weight", "out.bias"]},
    {"transpose": ["one.weight"]},
    {"stacked": {"both.weight": 2}},
    {"stacked": {"both.weight": 3}},
    {"rename": {"both.weight": "out.weight"}},
    {"stacked": {"out.weight": 4}},
]
PAGES = st.lists(st.sampled_from(range(len(RULES))), unique=True, max_size=4)
PAIRS = st.sampled_from([("apart", "two ranks"), ("fused", "two ranks"), ("two ranks", "apart")])


@given(PAIRS, PAGES)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@pytest.mark.long
def test_the_map_of_any_page_says_what_its_plan_does(
    runs: Path, pair: tuple[str, str], chosen: list[int]
) -> None:
    """A plan is refused where the map refuses, with one of its reasons; else it fills the
    parameters that the map says, each element from one of the source, and lists those that are
    fresh and left behind."""
    run, source = (runs / name for name in pair)
    page: dict[str, Any] = {}
    for key, rule in ((k, r) for i in chosen for k, r in RULES[i].items()):
        page[key] = [*page.get(key, []), *rule] if key == "transpose" else page.get(key, {}) | rule
    with TemporaryDirectory() as folder:
        names = Path(folder) / "names.yaml"
        names.write_text(json.dumps(page))
        made = mapped(run, source, names=str(names))
        recipe = from_data({"transplant": {"source": str(source), "names": str(names)}})
        reasons = [why.what for row in made.rows for why in row.refused]
        reasons += [why.what for why in made.refused]
        try:
            done = plan(Run.open(run), recipe)
        except SurgeryError as error:
            assert error.what in reasons, (error.what, reasons)
            return
    assert not reasons and not made.names("refused")
    for new in (change.new for change in done.changes):
        if isinstance(new, Computed):
            read = sum((s.end - s.start) // ITEM_BYTES[s.dtype] for s in new.terms[0])
            assert read == new.size // ITEM_BYTES[new.dtype]
    changed = {c.field.partition(" of ")[2] for c in done.changes if " of " in c.field}
    assert changed <= set(made.names("filled"))
    assert _listed(done.warnings, "left as") == first_few(made.names("fresh"))
    assert _listed(done.warnings, "not in this run") == first_few([n.name for n in made.left])


def _listed(warnings: tuple[str, ...], which: str) -> str:
    """The names at the end of a warning of the plan."""
    return next((text.rpartition(": ")[2] for text in warnings if which in text), "")


def rows(made: ParameterMap) -> dict[str, tuple[str, list[str], tuple[str, ...]]]:
    return {
        row.name: (row.state, [each.name for each in row.sources], row.how) for row in made.rows
    }


def test_each_state_is_said_of_the_parameters_that_have_it(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "names.yaml"
    page.write_text("split: {'both.{rest}': ['one.{rest}', 'two.{rest}']}\n")
    made = mapped(runs / "apart", runs / "two ranks", names=str(page))
    assert rows(made)["two.weight"] == ("filled", ["both.weight"], ("part 2 of 2",))
    (row,) = (row for row in made.rows if row.name == "two.weight")
    assert (row.shape, row.sources[0].shape) == ((8, 8), (16, 8))
    assert set(row.kinds) == {"weights", "exp_avg", "exp_avg_sq", "master"}
    back = mapped(runs / "two ranks", runs / "apart", names=str(page))
    assert rows(back)["both.bias"] == ("filled", ["one.bias", "two.bias"], ())
    made = mapped(runs / "deeper", runs / "plain")
    assert made.names("fresh") == ["3.weight", "3.bias"] and not made.left
    made = mapped(runs / "plain", runs / "deeper")
    assert [(each.name, each.shape) for each in made.left] == [("3.weight", (8, 8)),
                                                               ("3.bias", (8,))]  # fmt: skip
    made = mapped(runs / "more words", runs / "words")
    assert rows(made)["embed.weight"][2] == ("12 of 20 rows, the others stay fresh",)
    made = mapped(runs / "words", runs / "more words")
    assert rows(made)["embed.weight"][2] == ("12 of its 20 rows, the others are left behind",)


WRONG = {
    "fuse: {both.bias: [one.bias, two.bias, out.bias]}":
        "both.bias has 16 rows where it is one, and 8 and 8 and 8 where it is several",
    "rename: {one.bias: both.bias}\nstacked: {one.bias: 3}":
        "both.bias has 16 rows where it is one, and 2 and 2 and 2 where it is several",
    "stacked: {out.weight: 2}": "out.weight is under stacked, and which of the runs has it so",
    "fuse: {both.bias: [one.bias, two.bias]}\nstacked: {both.bias: 2}":
        "both.bias is under stacked, and its rows are fused, split or turned as well",
    "fuse: {both.bias: [one.bias, two.bias]}\ntranspose: [one.bias]": "only a matrix is transposed",
    "fuse: {both.weight: [one.weight, two.weight]}\ntranspose: ['{name}.weight']":
        "both.weight is under transpose, and which of the runs has it so is not said",
}  # fmt: skip


@pytest.mark.parametrize("page", WRONG)
def test_rows_that_do_not_fit_are_refused_by_name(runs: Path, tmp_path: Path, page: str) -> None:
    names = tmp_path / "names.yaml"
    names.write_text(page)
    made = mapped(runs / "fused", runs / "apart", names=str(names))
    refused = [why.what for row in made.rows for why in row.refused]
    assert any(WRONG[page] in reason for reason in refused), refused


def test_a_refusal_hides_no_other_row(runs: Path) -> None:
    """All that do not fit are named, where the plan stops at the first."""
    made = mapped(runs / "wide", runs / "plain")
    refused = {row.name: row.refused[0].what for row in made.rows if row.state == "refused"}
    assert list(refused) == ["0.weight", "2.weight", "0.bias", "1.weight", "1.bias"]
    assert "has the sizes [640, 8] and [8, 8]" in refused["0.weight"]
    assert made.names("filled") == ["2.bias"]
    made = mapped(runs / "numbers", runs / "numbered")
    assert ["numbers the states" in why.what for why in made.refused] == [True]
    assert len(made.names("filled")) == len(made.rows) > 1
    made = mapped(runs / "deeper", runs / "plain", require_all=True)
    assert ["not every parameter" in why.what for why in made.refused] == [True]


def test_the_command_prints_it_and_changes_nothing(runs: Path) -> None:
    run, source = runs / "wide", runs / "plain"
    before = exact_snapshot(run)
    words = ("transplant", "--from", source, "--print-map", "-C", run)
    shown = invoke(*words)
    assert shown.exit_code == 0 and exact_snapshot(run) == before
    assert "1 filled, 0 fresh, 5 refused, 0 left behind" in shown.stdout
    document = json.loads(invoke(*words, "--json").stdout)
    states = {row["name"]: row["state"] for row in document["parameters"]}
    assert states["2.bias"] == "filled" and states["0.weight"] == "refused"
    assert len(document["next"]) == len(set(document["next"])) > 0
    row = next(row for row in document["parameters"] if row["name"] == "2.bias")
    assert row["from"] == [{"name": "2.bias", "shape": [8]}]


def test_padding_is_counted(runs: Path, tmp_path: Path) -> None:
    """Of a flat tensor that the ranks share, the elements after the last parameter."""
    with process_group():
        launched("make", tmp_path / "three", Options(stage=1, model="plain"), 3, 1)
    assert mapped(tmp_path / "three", runs / "plain").padding > 0
    assert mapped(runs / "plain", tmp_path / "three").padding == 0
