"""Tags inside custom_scalars layouts and hparams follow a rename, read back with their plugins."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import metadata, summary_v2
from tensorboard.summary.writer.record_writer import RecordWriter

from ckptsurgeon.logs import rename
from ckptsurgeon.logs.tensorboard import event_file
from tests.support.training_log import apply, scalar

PAIRS = {"lm loss": "train/lm loss", "acc (%)": "train/acc (%)", "low": "train/low"}


@pytest.fixture(params=["native", "python"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(event_file, "native", None)


def write(directory: Path, *summaries: Summary) -> Path:
    path = directory / "events.out.tfevents.1600000000.host.1.0"
    with path.open("wb") as file:
        writer = RecordWriter(file)
        for step, summary in enumerate(summaries):
            event = Event(wall_time=1.6e9 + step, step=step, summary=summary)
            writer.write(event.SerializeToString())
    return path


def layout() -> Summary:
    """Charts by literal tags, by an escaped one, by a pattern, and with margins."""
    from torch.utils.tensorboard.summary import custom_scalars

    lines = ["Multiline", ["lm loss", re.escape("acc (%)"), "lm .*", "else.*"]]
    charts = {"lm loss": lines, "margins": ["Margin", ["lm loss", "low", "high"]]}
    summary: Summary = custom_scalars({"losses": charts})  # type: ignore[no-untyped-call]
    return summary


def test_charts_follow_and_patterns_are_told(tmp_path: Path) -> None:
    values = [scalar(tag, 1.0, True) for tag in ("lm loss", "acc (%)", "low", "high")]
    path = write(tmp_path, layout(), Summary(value=values))
    changes, counts = rename.rename(tmp_path, tmp_path, PAIRS)
    apply(changes, tmp_path)
    events = list(LegacyEventFileLoader(str(path)).Load())
    found = layout_pb2.Layout.FromString(events[0].summary.value[0].tensor.string_val[0])
    lines, margins = found.category[0].chart
    assert list(lines.multiline.tag) == [
        "train/lm loss",
        re.escape("train/acc (%)"),
        "lm .*",
        "else.*",
    ]
    assert lines.title == "lm loss"
    (series,) = margins.margin.series
    assert (series.value, series.lower, series.upper) == ("train/lm loss", "train/low", "high")
    assert sum(counts.events.values()) == 3
    assert counts.patterns == ("lm .*",)
    assert "'lm .*'" in counts.sentences()[-1]
    assert rename.rename(tmp_path, tmp_path, PAIRS)[0] == []


def test_hparams_metrics_follow(tmp_path: Path) -> None:
    metrics = [
        summary_v2.Metric("lm loss", display_name="lm loss"),
        summary_v2.Metric("other", group="v", display_name="lm loss"),
    ]
    experiment = summary_v2.hparams_config_pb([], metrics, time_created_secs=1.0)
    path = write(tmp_path, experiment, Summary(value=[scalar("x", 1.0, False)]))
    changes, _ = rename.rename(tmp_path, tmp_path, PAIRS)
    apply(changes, tmp_path)
    (event, _) = LegacyEventFileLoader(str(path)).Load()
    content = event.summary.value[0].metadata.plugin_data.content
    found = metadata.parse_experiment_plugin_data(content).metric_infos
    assert [(info.name.group, info.name.tag, info.display_name) for info in found] == [
        ("", "train/lm loss", "lm loss"),
        ("v", "other", "lm loss"),
    ]
