from __future__ import annotations

import pytest

from ludic.lazy import resolve


@pytest.mark.parametrize(
    ("earlier", "now"),
    [
        ("ludic.envs.gsm8k:GSM8KEnv", "ludic.envs.datasets.gsm8k:GSM8KEnv"),
        ("ludic.envs.math:MATHEnv", "ludic.envs.datasets.math:MATHEnv"),
        (
            "ludic.envs.tic_tac_toe_teacher:random_legal",
            "ludic.envs.tic_tac_toe.teacher:random_legal",
        ),
    ],
)
def test_places_in_run_folders_from_before_the_moves_still_resolve(earlier: str, now: str) -> None:
    assert resolve(earlier) is resolve(now)


def test_an_attribute_may_be_dotted() -> None:
    assert resolve("ludic.types:Rollout.turns").__name__ == "turns"
