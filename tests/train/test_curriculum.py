"""The curriculum on the sequence length is DeepSpeed's, number for number."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler

from train.curriculum import Curriculum, check_curriculum
from train.errors import UsageError

CASES: tuple[dict[str, Any], ...] = (
    {"schedule_type": "fixed_linear", "total_curriculum_step": 30, "difficulty_step": 8},
    {"schedule_type": "fixed_linear", "total_curriculum_step": 7, "difficulty_step": 1},
    {"schedule_type": "fixed_root", "total_curriculum_step": 50, "difficulty_step": 8,
     "root_degree": 2},
    {"schedule_type": "fixed_root", "total_curriculum_step": 41, "difficulty_step": 4,
     "root_degree": 3},
    {"schedule_type": "fixed_discrete", "difficulty": [8, 24, 128], "max_step": [5, 20]},
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["schedule_type"]))
def test_every_length_is_deepspeeds(case: dict[str, Any]) -> None:
    ours = Curriculum(min_difficulty=8, max_difficulty=128, **case)
    check_curriculum(ours, 128)
    config = {key: value for key, value in case.items() if key != "schedule_type"}
    theirs = CurriculumScheduler(
        {"min_difficulty": 8, "max_difficulty": 128, "schedule_type": case["schedule_type"],
         "schedule_config": config}
    )  # fmt: skip
    lengths = [ours.length(step, seq_length=128) for step in range(1, 80)]
    assert lengths == [theirs.update_difficulty(step) for step in range(1, 80)]
    assert lengths[0] < 128 and lengths[-1] == 128


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"schedule_type": "custom"}, "schedule_type is custom"),
        ({"min_difficulty": 12}, "a multiple of difficulty_step"),
        ({"max_difficulty": 200}, r"in 1 … seq_length 128"),
        ({"min_difficulty": 64, "max_difficulty": 32}, "min_difficulty is 64; it must be at most"),
        ({"total_curriculum_step": 0}, "total_curriculum_step is 0"),
        ({"schedule_type": "fixed_discrete", "difficulty": [8]}, None),
        ({"schedule_type": "fixed_discrete", "difficulty": [8], "max_step": [1]}, "one longer"),
        ({"schedule_type": "fixed_discrete", "difficulty": [16, 8], "max_step": [1]}, "ascending"),
    ],
)
def test_a_curriculum_without_a_length_is_refused(fields: dict[str, Any], says: str | None) -> None:
    curriculum = Curriculum(**fields)
    if says is None:
        check_curriculum(curriculum, 128)
        assert curriculum.length(1, 128) == 8
        return
    with pytest.raises(UsageError, match=says):
        check_curriculum(curriculum, 128)
