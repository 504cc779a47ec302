"""On one or more ranks: train every case of the JSON argument, print each one's losses as JSON.

A second one may have what is added to the options of a case when it is resumed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.support.in_process import InProcess
from tests.support.trained_run import step_back
from train import distributed


def main() -> None:
    work, corpus = Path(sys.argv[1]), Path(sys.argv[2])
    cases = json.loads(sys.argv[3])
    later = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    distributed.complete_environment()  # where nobody launched several ranks
    runner = InProcess(corpus, distributed.start(1))
    found = {}
    for name, overrides in cases.items():
        whole = runner.train(work / name, *overrides)
        distributed.gather(None)  # all have finished before rank 0 moves the pointer
        if distributed.rank() == 0:
            step_back(work / name, 4)
        distributed.gather(None)
        resumed = runner.train(work / name, *overrides, *later.get(name, []))
        found[name] = {"whole": whole, "resumed": resumed}
    if distributed.rank() == 0:
        print(json.dumps(found), flush=True)
    distributed.finish()


if __name__ == "__main__":
    main()
