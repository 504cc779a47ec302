"""`bench gpu` keeps what it has when it is cut off, and goes on from there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import gpu
from bench.gpu import Step, read, rows, sources
from bench.row import Row

SAYS = """print('{"passed": 3, "failed": 0}', flush=True)"""
WAITS = "import time; time.sleep(60)"


def step(name: str, *statements: str, seconds: float = 60) -> Step:
    return Step(name, seconds, ("timeit", "-n1", "-r1", *statements))


def measured(steps: list[Step], kept: Path, monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    monkeypatch.setenv("BENCH_GPU", str(kept))
    monkeypatch.setattr(gpu, "STEPS", steps)
    monkeypatch.setattr(gpu, "_has_gpu", lambda: True)
    return gpu.measure(kept.parent, False, lambda text: None)


def test_a_step_that_is_cut_off_keeps_its_lines_and_alone_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "gpu.json"
    cut = [step("machine", SAYS), step("parity", SAYS, WAITS, seconds=5)]
    unended, _parity = measured(cut, kept, monkeypatch)
    assert (unended.note, unended.met) == ("parity", False)
    figures = read(kept)
    assert [figures[s.name]["ended"] for s in cut] == [True, False]
    assert figures["parity"]["lines"] == [{"passed": 3, "failed": 0, "sources": sources()}]
    figures["machine"]["lines"] = [{"not": "run again"}]
    kept.write_text(json.dumps(figures))
    (row,) = measured([cut[0], step("parity", SAYS)], kept, monkeypatch)
    assert read(kept)["machine"]["lines"] == [{"not": "run again"}]
    assert read(kept)["parity"]["ended"]
    assert (row.measured, row.met) == (0, True)


def test_figures_of_older_kernels_say_so_until_they_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "gpu.json"
    old = {"lines": [], "ended": True, "sources": "others"}
    kept.write_text(json.dumps({"machine": old, "parity": old}))
    older, _parity = measured([step("parity", SAYS)], kept, monkeypatch)
    assert (older.measured, older.note) == (1, "machine")
    assert measured([step("machine", SAYS)], kept, monkeypatch)[0].what.endswith("fail")


def test_training_goes_on_after_what_it_has_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "gpu.json"
    variant = {"mfu": 0.5, "tokens_per_second": 3, "peak_gib": 2}
    lines = [
        {"what": "default", **variant, "sources": sources()},
        {"what": "ZeRO 0", **variant, "sources": "others"},
    ]
    kept.write_text(json.dumps({"training": {"lines": lines, "ended": False, "sources": "others"}}))
    answer = f"json.dumps({{'what': sys.argv[-1], **{variant}}})"
    says = f"import sys, json; default = 0; print({answer})"
    words = ("timeit", "-n1", "-r1", says)
    found = measured([Step("training", 60, words, goes_on=True)], kept, monkeypatch)
    assert [(row.what, "older" in row.note) for row in found] == [
        ("gpu: 1.3 B, ZeRO 0: MFU", True),
        ("gpu: 1.3 B, default: MFU", False),
    ]


def test_the_rows_say_what_is_wrong_and_what_is_slower() -> None:
    def lines(*found: dict[str, Any]) -> dict[str, Any]:
        now = sources()
        return {"lines": [{**f, "sources": now} for f in found], "ended": True, "sources": now}

    figures = {
        "starts": lines({"what": "ZeRO 1 bf16", "kept": False, "said": "lr"},
                        {"what": "ZeRO 0 fp32", "kept": True, "said": ""}),
        "determinism": lines({"what": "plain", "differ": 1, "exact": True},
                             {"what": "sdpa", "differ": 5, "exact": False}),
        "kernels": lines({"what": "copy", "bytes_per_second": 3},
                         {"what": "gelu", "ms": {"ours": 2.0, "eager": 4.0, "compile": 1.0}}),
        "training": lines({"what": "default", "mfu": 0.4, "tokens_per_second": 3, "peak_gib": 2}),
    }  # fmt: skip
    found = rows(figures)
    assert [row.met for row in found] == [False, False, True, True, False]
    assert "ZeRO 1 bf16: lr" in found[0].note
    assert found[3].what == "gpu: gelu against compile" and found[3].measured == 0.5
