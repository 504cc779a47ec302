"""Prints, per parameter of a resumed run, the L1 norms of its moments as DeepSpeed itself gathers
them; run on one or more ranks. Usage: full_state.py RUN"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from train import distributed
from train.config import load_config
from train.run_folder import find_checkpoint


def main(root: Path) -> None:
    config = load_config(root / "train.yaml")
    distributed.complete_environment()  # where nobody launched several ranks
    device = distributed.start(1)
    from deepspeed.utils import safe_get_full_optimizer_state

    from train import trainer

    training = trainer.prepare(config, find_checkpoint(root, False), device)
    if config.zero_stage in (1, 2):
        # Else DeepSpeed links them at the first step only.
        training.engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {
        name: [
            float(safe_get_full_optimizer_state(parameter, key).abs().sum())
            for key in ("exp_avg", "exp_avg_sq")
        ]
        for name, parameter in training.engine.module.named_parameters()
    }
    if distributed.rank() == 0:
        print(json.dumps(found))
    distributed.finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
