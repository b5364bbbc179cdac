"""Questions from a dataset: rows, seeds, rewards, and the GSM8K and MATH environments."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.envs import DatasetQAEnv, EnvRunner, GSM8KEnv, MATHEnv
from ludic.errors import ConfigError, EnvError
from ludic.registry import make_env
from ludic.rewards import Attempt
from ludic.types import StepOutcome

ROWS = [{"question": f"What is {n} + 1?", "answer": str(n + 1), "id": f"q{n}"} for n in range(20)]
GSM8K_ROWS = [
    {"question": "Ann has 3 bags of 24 pens. How many pens?", "answer": "3*24=<<72>>72\n#### 72"},
    {"question": "A car costs how much?", "answer": "It is $12,500.\n#### 12,500"},
    {"question": "How deep?", "answer": "Below.\n#### -5"},
]
MATH_ROWS = [
    {"problem": "Halve 1.", "solution": "It is $\\boxed{\\frac{1}{2}}$.", "level": "Level 1"},
    {"problem": "Expand.", "answer": "x^2+2x+1", "solution": "see above"},
]


def answer(env: DatasetQAEnv, action: str, *, seed: int | None = 0) -> StepOutcome:
    env.reset(seed=seed)
    outcomes = env.step({"agent": action})
    assert isinstance(outcomes, Mapping)
    return outcomes["agent"]


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    return path


class TestRows:
    @given(st.integers(0, 2**63 - 1))
    def test_the_seed_picks_the_row(self, seed: int) -> None:
        first, second = DatasetQAEnv(rows=ROWS), DatasetQAEnv(rows=ROWS)
        assert first.env_reset(seed=seed) == second.env_reset(seed=seed)
        assert first.task_key() == second.task_key()

    def test_seeds_reach_every_row(self) -> None:
        env = DatasetQAEnv(rows=ROWS)
        assert len({env.env_reset(seed=seed)[0] for seed in range(300)}) == len(ROWS)

    def test_a_row_can_be_pinned(self) -> None:
        env = DatasetQAEnv(rows=ROWS, index=7)
        assert {env.env_reset(seed=seed)[0] for seed in range(10)} == {"What is 7 + 1?"}
        assert env.task_key() == "rows#7"

    def test_a_pinned_row_that_is_not_there_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="it has 20 rows"):
            DatasetQAEnv(rows=ROWS, index=20).env_reset(seed=0)

    def test_the_limit_takes_the_first_rows(self) -> None:
        env = DatasetQAEnv(rows=ROWS, limit=2)
        assert env.num_rows() == 2
        assert {env.env_reset(seed=s)[0] for s in range(50)} == {
            "What is 0 + 1?",
            "What is 1 + 1?",
        }

    def test_the_task_key_is_the_id_of_the_row(self, jsonl: Path) -> None:
        env = DatasetQAEnv(path=str(jsonl), id_key="id", index=3)
        env.env_reset(seed=0)
        assert env.task_key() == "sums#q3"

    def test_rows_are_read_from_a_file_once(self, jsonl: Path) -> None:
        envs = [DatasetQAEnv(path=str(jsonl)) for _ in range(3)]
        assert [env.num_rows() for env in envs] == [20] * 3
        assert envs[0].data is envs[2].data

    def test_a_changed_file_is_read_again(self, jsonl: Path) -> None:
        assert DatasetQAEnv(path=str(jsonl)).num_rows() == 20
        jsonl.write_text(json.dumps(ROWS[0]))
        assert DatasetQAEnv(path=str(jsonl)).num_rows() == 1

    def test_a_local_dataset_is_loaded_as_from_the_hub(self, tmp_path: Path) -> None:
        (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
        env = DatasetQAEnv(hub=str(tmp_path), index=2)
        assert env.env_reset(seed=0)[0] == "What is 2 + 1?"

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            ("", "no rows"),
            ("{", "line 1, is not JSON"),
            ("{}\n[1]", "line 2, is not a JSON object"),
        ],
    )
    def test_a_broken_file_is_said_with_its_line(
        self, tmp_path: Path, content: str, says: str
    ) -> None:
        path = tmp_path / "broken.jsonl"
        path.write_text(content)
        with pytest.raises(ConfigError, match=says):
            DatasetQAEnv(path=str(path)).env_reset(seed=0)

    def test_a_mark_of_byte_order_is_no_part_of_the_first_row(self, jsonl: Path) -> None:
        jsonl.write_text("\ufeff" + jsonl.read_text(encoding="utf-8"), encoding="utf-8")
        assert DatasetQAEnv(path=str(jsonl)).num_rows() == 20

    def test_a_missing_file_is_said(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot be read"):
            DatasetQAEnv(path=str(tmp_path / "nothing.jsonl")).env_reset(seed=0)

    def test_a_path_that_is_no_text_file_is_said(self, tmp_path: Path) -> None:
        (tmp_path / "latin.jsonl").write_bytes(b'{"question": "\xe9"}')
        for path in ("", str(tmp_path), str(tmp_path / "latin.jsonl")):
            with pytest.raises(ConfigError, match=r"the dataset .* cannot be read"):
                DatasetQAEnv(path=path).env_reset(seed=0)

    def test_a_missing_column_is_said_with_those_that_are_there(self) -> None:
        env = DatasetQAEnv(rows=ROWS, question_key="prompt")
        with pytest.raises(EnvError, match=r"no column 'prompt'.*'question'"):
            env.env_reset(seed=0)

    @pytest.mark.parametrize("source", [{}, {"rows": ROWS, "path": "x"}])
    def test_exactly_one_source_is_needed(self, source: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="one of rows, path or hub"):
            DatasetQAEnv(**source).env_reset(seed=0)

    @pytest.mark.parametrize("options", [{"template": "no place"}, {"limit": 0}])
    def test_options_that_cannot_be_are_refused(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigError):
            DatasetQAEnv(rows=ROWS, **options)


class TestAnswering:
    def test_one_answer_ends_the_episode_with_its_reward(self) -> None:
        env = DatasetQAEnv(rows=ROWS, index=4)
        right, wrong = answer(env, "5"), answer(env, "6")
        assert (right.reward, right.terminated, right.truncated) == (1.0, True, False)
        assert (wrong.reward, wrong.terminated) == (0.0, True)

    def test_the_parts_of_the_reward_are_kept(self) -> None:
        env = DatasetQAEnv(
            rows=ROWS,
            index=4,
            rewards=["numeric", {"kind": "length", "limit": 1, "weight": 0.25}],
        )
        outcome = answer(env, "5")
        assert outcome.reward == 1.25
        assert outcome.reward_components == {"numeric": 1.0, "length": 0.25}

    def test_the_target_is_not_shown_to_the_agent(self) -> None:
        env = DatasetQAEnv(rows=[{"question": "secret?", "answer": "xyzzy"}])
        obs, info = env.env_reset(seed=0)
        assert "xyzzy" not in obs + json.dumps(info) + answer(env, "a").obs

    def test_the_template_is_put_around_the_question(self) -> None:
        env = DatasetQAEnv(
            rows=[{"question": "{x} {question}?", "answer": ""}], template="Q: {question}"
        )
        assert env.env_reset(seed=0)[0] == "Q: {x} {question}?"

    def test_a_second_answer_is_refused(self) -> None:
        env = DatasetQAEnv(rows=ROWS)
        answer(env, "5")
        with pytest.raises(EnvError, match="reset it first"):
            env.step({"agent": "5"})

    async def test_a_reward_may_be_asynchronous(self) -> None:
        async def slow(attempt: Attempt) -> float:
            await asyncio.sleep(0)
            return float(attempt.row["id"] == "q4" and attempt.question == "What is 4 + 1?")

        runner = EnvRunner(DatasetQAEnv(rows=ROWS, index=4, rewards=["exact", slow]))
        await runner.reset(0)
        outcome = (await runner.step({"agent": "5"}))["agent"]
        assert outcome.reward_components == {"exact": 1.0, "slow": 1.0}
        assert outcome.reward == 2.0
        await runner.close()

    def test_it_is_made_by_name_with_json(self) -> None:
        options = json.loads(json.dumps({"rows": ROWS, "rewards": ["numeric"], "index": 1}))
        env = make_env("dataset_qa", **options)
        assert isinstance(env, DatasetQAEnv)
        assert answer(env, "2.0").reward == 1.0


class TestGSM8K:
    @pytest.mark.parametrize(
        ("index", "action", "reward"),
        [
            (0, "72", 1.0),
            (0, "72.0", 1.0),
            (0, "$72", 1.0),
            (0, "073", 0.0),
            (0, "", 0.0),
            (0, "#### 72 and 73", 0.0),
            (1, "12500", 1.0),
            (1, "12,500.00", 1.0),
            (2, "-5", 1.0),
            (2, "5", 0.0),
        ],
    )
    def test_the_answer_is_judged_by_its_number(
        self, index: int, action: str, reward: float
    ) -> None:
        assert answer(GSM8KEnv(rows=GSM8K_ROWS, index=index), action).reward == reward

    @pytest.mark.integration
    def test_and_by_symbolic_equality(self) -> None:
        assert answer(GSM8KEnv(rows=GSM8K_ROWS, index=0), "8 \\cdot 9").reward == 1.0

    def test_a_row_without_its_number_is_an_error(self) -> None:
        env = GSM8KEnv(rows=[{"question": "?", "answer": "no mark"}])
        with pytest.raises(EnvError, match="no number follows '####'"):
            env.env_reset(seed=0)

    def test_it_says_how_to_answer(self) -> None:
        assert "\\boxed" in (GSM8KEnv(rows=GSM8K_ROWS).suggested_sysprompt("agent") or "")

    def test_the_reward_can_be_another(self) -> None:
        env = GSM8KEnv(rows=GSM8K_ROWS, index=0, rewards={"kind": "numeric", "find": "last"})
        assert answer(env, "They are 72 pens.").reward == 1.0


@pytest.mark.integration
class TestMATH:
    @pytest.mark.parametrize(
        ("index", "action", "reward"),
        [
            (0, "0.5", 1.0),
            (0, "\\tfrac{2}{4}", 1.0),
            (0, "0.51", 0.0),
            (1, "(x+1)^2", 1.0),
            (1, "x^2+1", 0.0),
        ],
    )
    def test_the_answer_is_judged_by_symbolic_equality(
        self, index: int, action: str, reward: float
    ) -> None:
        assert answer(MATHEnv(rows=MATH_ROWS, index=index), action).reward == reward

    @pytest.mark.parametrize("row", [{"problem": "?", "solution": "none"}, {"problem": "?"}])
    def test_a_row_without_an_answer_is_an_error(self, row: dict[str, str]) -> None:
        with pytest.raises(EnvError):
            MATHEnv(rows=[row]).env_reset(seed=0)
