"""What OLMo-core's own StabilityMonitor says of the curves that tests/look/curves/ keeps.

`python -m tests.look.stability_monitor FILE` writes its verdicts, with ai2-olmo-core on the path:
`pip install --target DIR --no-deps ai2-olmo-core`, and then what it needs, `cached_path bettermap
dataclass-extensions`.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import sys
from importlib import metadata
from pathlib import Path

from tests.look.advised_runs import CURVES

VERDICTS = Path(__file__).parent / "stability_monitor.json"
METRICS = {"loss": "train/CE loss", "grad_norm": "optim/total grad norm"}


def column(path: Path, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one column, without what is no number."""
    with gzip.open(path, "rt") as file:
        rows = [(int(row["step"]), float(row[name])) for row in csv.DictReader(file)]
    rows = [row for row in rows if math.isfinite(row[1])]
    return [step for step, _ in rows], [value for _, value in rows]


def verdicts() -> dict[str, dict[str, list[int]]]:
    """Run → column → the steps that the monitor counts as spikes."""
    from olmo_core.train.callbacks.stability_monitor import StabilityMonitorCallback

    told: dict[str, dict[str, list[int]]] = {}
    for path in sorted(CURVES.glob("*.csv.gz")):
        told[path.name] = {}
        for name, metric in METRICS.items():
            monitor = StabilityMonitorCallback()
            found = told[path.name].setdefault(name, [])
            for step, value in zip(*column(path, name), strict=True):
                monitor.pre_log_metrics(step, {metric: value})
                if monitor.state_dict()["spike_history"][-1]:
                    found.append(step)
    return told


def main() -> None:
    """Write the verdicts and the version that gave them."""
    document = {"ai2-olmo-core": metadata.version("ai2-olmo-core"), "spikes": verdicts()}
    Path(sys.argv[1]).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
