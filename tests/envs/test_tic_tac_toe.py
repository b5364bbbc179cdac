"""Tic-Tac-Toe: the rules, perfect play checked against brute force, and both environments."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from random import Random
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.envs import EnvRunner, TicTacToeEnv, TwoPlayerTicTacToeEnv
from ludic.envs.tic_tac_toe import (
    CELLS,
    EMPTY,
    Board,
    Mark,
    best_cells,
    free_cells,
    is_over,
    play,
    read_cell,
    to_move,
    value,
    winner,
)
from ludic.errors import ConfigError, EnvError
from ludic.registry import make_env
from ludic.types import StepOutcome

MARKS: tuple[Mark, ...] = ("X", "O")
SEEDS = st.integers(0, 2**63 - 1)


def won_by(board: Board, mark: str) -> bool:
    """Another way to say it: the grid, its transpose, and the two diagonals."""
    grid = [list(board[row * 3 : row * 3 + 3]) for row in range(3)]
    lines = [*grid, *map(list, zip(*grid, strict=True))]
    lines += [[grid[i][i] for i in range(3)], [grid[i][2 - i] for i in range(3)]]
    return [mark] * 3 in lines


@cache
def outcomes_for_x(board: Board, turn: str) -> int:
    """Plain minimax for X, without depth: 1 win, 0 draw, -1 loss. The reference."""
    if won_by(board, "X"):
        return 1
    if won_by(board, "O"):
        return -1
    free = [i for i in range(9) if board[i] == "."]
    if not free:
        return 0
    after = [board[:i] + turn + board[i + 1 :] for i in free]
    results = [outcomes_for_x(b, "O" if turn == "X" else "X") for b in after]
    return max(results) if turn == "X" else min(results)


def reachable() -> set[Board]:
    """Every position that play can reach."""
    seen = {EMPTY}
    todo = [EMPTY]
    while todo:
        board = todo.pop()
        if not is_over(board):
            for place in free_cells(board):
                after = play(board, place)
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
    return seen


REACHABLE = reachable()


def all_games(perfect: Mark, board: Board = EMPTY) -> Iterator[Board]:
    """The end of every game in which `perfect` plays any best move, and the other any move."""
    if is_over(board):
        yield board
        return
    moves = best_cells(board) if to_move(board) == perfect else free_cells(board)
    for place in moves:
        yield from all_games(perfect, play(board, place))


def outcome(result: Any) -> StepOutcome:
    assert isinstance(result, StepOutcome)
    return result


def play_episode(env: TicTacToeEnv, seed: int, random: Random) -> list[Any]:
    """Everything that an episode of legal random moves shows."""
    seen: list[Any] = [env.env_reset(seed=seed)]
    while True:
        cell = random.choice([CELLS[place] for place in free_cells(env.board)])
        step = outcome(env.env_step(cell))
        seen.append((cell, step))
        if step.terminated:
            return seen


class TestRules:
    def test_there_are_as_many_positions_as_the_literature_says(self) -> None:
        assert len(REACHABLE) == 5478
        assert sum(is_over(board) for board in REACHABLE) == 958

    def test_the_winner_agrees_with_another_way_to_find_it(self) -> None:
        for board in REACHABLE:
            expected = next((mark for mark in MARKS if won_by(board, mark)), None)
            assert winner(board) == expected

    @pytest.mark.parametrize(
        ("text", "place"),
        [("A1", 0), ("c3", 8), (" b2\n", 4), ("", None), ("D1", None), ("A1 B2", None)],
    )
    def test_cells_are_read_by_name(self, text: str, place: int | None) -> None:
        assert read_cell(text) == place

    @given(st.text())
    def test_any_text_is_a_cell_or_not(self, text: str) -> None:
        assert read_cell(text) is None or text.strip().upper() in CELLS


class TestPerfectPlay:
    def test_minimax_agrees_with_brute_force_on_every_position(self) -> None:
        for board in REACHABLE:
            turn = to_move(board)
            for_x = outcomes_for_x(board, turn)
            for_mover = for_x if turn == "X" else -for_x
            got = value(board)
            assert (got > 0) - (got < 0) == for_mover, board

    def test_every_best_move_keeps_the_value(self) -> None:
        for board in REACHABLE:
            if is_over(board):
                continue
            turn = to_move(board)
            sign = 1 if turn == "X" else -1
            best = sign * outcomes_for_x(board, turn)
            assert best_cells(board)
            for place in best_cells(board):
                after = play(board, place)
                assert sign * outcomes_for_x(after, to_move(after)) == best

    def test_a_win_in_one_move_is_taken_and_one_is_blocked(self) -> None:
        assert best_cells("XX.OO....") == (2,)
        assert best_cells("XX.O.....") == (2,)

    @pytest.mark.parametrize("mark", MARKS)
    def test_the_perfect_player_never_loses_against_anything(self, mark: Mark) -> None:
        other = "O" if mark == "X" else "X"
        ends = list(all_games(mark))
        assert len(ends) > 100
        assert not any(winner(board) == other for board in ends)

    def test_two_perfect_players_draw(self) -> None:
        def ends(board: Board) -> Iterator[Board]:
            if is_over(board):
                yield board
            else:
                for place in best_cells(board):
                    yield from ends(play(board, place))

        assert {winner(board) for board in ends(EMPTY)} == {None}


class TestSingleAgent:
    @pytest.mark.parametrize("mark", MARKS)
    @given(seed=SEEDS, moves=st.integers())
    def test_nobody_beats_the_perfect_opponent(self, mark: Mark, seed: int, moves: int) -> None:
        env = TicTacToeEnv(opponent="perfect", mark=mark)
        last = play_episode(env, seed, Random(moves))[-1][1]
        assert last.info["result"] in ("draw", "loss")

    @pytest.mark.parametrize("opponent", ["random", "perfect", "mixed"])
    @given(seed=SEEDS, moves=st.integers())
    def test_the_same_seed_and_actions_give_the_same_episode(
        self, opponent: Literal["random", "perfect", "mixed"], seed: int, moves: int
    ) -> None:
        episodes = [
            play_episode(TicTacToeEnv(opponent=opponent, mark="random"), seed, Random(moves))
            for _ in range(2)
        ]
        assert episodes[0] == episodes[1]

    def test_an_environment_used_before_gives_the_same_episode(self) -> None:
        env = TicTacToeEnv(opponent="mixed", mark="random")
        first = play_episode(env, 3, Random(1))
        play_episode(env, 4, Random(2))
        assert play_episode(env, 3, Random(1)) == first

    def test_the_seed_chooses_the_mark_and_the_opponent_moves_first_as_x(self) -> None:
        env = TicTacToeEnv(mark="random")
        marks = set()
        for seed in range(30):
            obs, info = env.env_reset(seed=seed)
            marks.add(info["mark"])
            assert obs.startswith(f"You are {info['mark']}.")
            assert env.board.count("X") == (info["mark"] == "O")
        assert marks == {"X", "O"}

    def test_different_seeds_give_different_opponents(self) -> None:
        boards = set()
        for seed in range(50):
            env = TicTacToeEnv(opponent="random", mark="O")
            env.env_reset(seed=seed)
            boards.add(env.board)
        assert len(boards) == 9

    def test_mixed_opponents_are_between_random_and_perfect(self) -> None:
        def losses(prob: float) -> int:
            env = TicTacToeEnv(opponent="mixed", perfect_prob=prob)
            games = [play_episode(env, seed, Random(seed))[-1][1] for seed in range(200)]
            return sum(game.info["result"] == "loss" for game in games)

        assert losses(0.0) < losses(0.5) < losses(1.0)

    def test_a_mixed_opponent_at_the_ends_is_the_pure_one(self) -> None:
        for prob, pure in ((0.0, "random"), (1.0, "perfect")):
            mixed = TicTacToeEnv(opponent="mixed", perfect_prob=prob)
            same = TicTacToeEnv(opponent=pure)  # type: ignore[arg-type]
            for seed in range(20):
                assert play_episode(mixed, seed, Random(seed)) == play_episode(
                    same, seed, Random(seed)
                )

    @pytest.mark.parametrize(("result", "reward"), [("win", 5.0), ("draw", 2.0), ("loss", -3.0)])
    def test_each_result_has_its_reward(self, result: str, reward: float) -> None:
        env = TicTacToeEnv(win_reward=5.0, draw_reward=2.0, loss_reward=-3.0, mark="random")
        found = 0
        for seed in range(100):
            steps = [step for _, step in play_episode(env, seed, Random(seed))[1:]]
            assert all(step.reward == 0.0 and not step.terminated for step in steps[:-1])
            if steps[-1].info["result"] == result:
                found += 1
                assert steps[-1].reward == reward
        assert found

    @pytest.mark.parametrize("action", ["Z9", "", "hello " * 1000, "\x00", "A1 A2"])
    def test_an_illegal_move_ends_the_game_with_its_penalty(self, action: str) -> None:
        env = TicTacToeEnv(illegal_reward=-2.0)
        env.env_reset(seed=0)
        step = outcome(env.env_step(action))
        assert (step.reward, step.terminated, step.truncated) == (-2.0, True, False)
        assert step.info["illegal_move"] is True
        assert env.board == EMPTY
        assert len(step.obs) < 200

    def test_a_taken_cell_is_an_illegal_move(self) -> None:
        env = TicTacToeEnv(mark="O")
        env.env_reset(seed=0)
        taken = CELLS[env.board.index("X")]
        assert outcome(env.env_step(taken)).info["result"] == "illegal"

    def test_after_an_illegal_move_one_may_try_again_where_that_is_the_rule(self) -> None:
        env = TicTacToeEnv(illegal_ends=False, illegal_reward=-0.25)
        env.env_reset(seed=0)
        step = outcome(env.env_step("Z9"))
        assert (step.reward, step.terminated) == (-0.25, False)
        assert step.obs.startswith("'Z9' is no cell.\nYou are X.")
        assert outcome(env.env_step("B2")).reward == 0.0

    def test_stepping_after_the_end_is_refused(self) -> None:
        env = TicTacToeEnv()
        with pytest.raises(EnvError, match="reset it first"):
            env.step({"agent": "A1"})
        env.reset(seed=0)
        env.step({"agent": "Z9"})
        with pytest.raises(EnvError, match="reset it first"):
            env.step({"agent": "A1"})

    @pytest.mark.parametrize(
        "options",
        [
            {"opponent": "good"},
            {"mark": "Y"},
            {"perfect_prob": 1.5},
            {"win_reward": math.nan},
            {"draw_reward": math.inf},
            {"loss_reward": -math.inf},
            {"illegal_reward": math.nan},
        ],
    )
    def test_options_that_cannot_be_are_refused(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="TicTacToeEnv"):
            TicTacToeEnv(**options)

    def test_the_range_of_returns_knows_of_illegal_moves(self) -> None:
        assert TicTacToeEnv(illegal_reward=-2.0).return_range == (-2.0, 1.0)
        assert TicTacToeEnv(illegal_ends=False).return_range == (-math.inf, 1.0)
        assert TwoPlayerTicTacToeEnv(loss_reward=0.0, illegal_reward=0.0).return_range == (0.0, 1.0)

    def test_two_players_have_finite_rewards_too(self) -> None:
        with pytest.raises(ConfigError, match=r"TwoPlayerTicTacToeEnv\(win_reward=nan"):
            TwoPlayerTicTacToeEnv(win_reward=math.nan)

    def test_the_observation_is_short_and_names_the_free_cells(self) -> None:
        env = TicTacToeEnv()
        obs, _ = env.env_reset(seed=0)
        assert obs == (
            "You are X.\n  A B C\n1 . . .\n2 . . .\n3 . . .\nFree: A1 B1 C1 A2 B2 C2 A3 B3 C3"
        )
        assert env.env_current_obs() == obs

    def test_it_is_made_by_name(self) -> None:
        assert isinstance(make_env("tic_tac_toe", opponent="perfect"), TicTacToeEnv)


class TestTwoPlayers:
    async def game(self, *moves: str, **options: Any) -> tuple[EnvRunner, list[Any]]:
        runner = EnvRunner(TwoPlayerTicTacToeEnv(**options))
        await runner.reset(0)
        outcomes = []
        for move in moves:
            outcomes.append(await runner.step(dict.fromkeys(runner.active_agents, move)))
        return runner, outcomes

    async def test_the_loser_hears_that_it_lost(self) -> None:
        runner, outcomes = await self.game("A1", "A2", "B1", "B2", "C1")
        last = outcomes[-1]
        assert runner.done
        assert (last["X"].reward, last["X"].terminated) == (1.0, True)
        assert (last["O"].reward, last["O"].terminated) == (-1.0, True)
        assert last["O"].obs.endswith("You lose.")
        assert last["X"].obs.endswith("You win.")

    async def test_a_draw_is_heard_by_both(self) -> None:
        _, outcomes = await self.game("A1", "B2", "C3", "B1", "B3", "A3", "C1", "C2", "A2")
        assert {o.reward for o in outcomes[-1].values()} == {0.0}
        assert all(o.info["result"] == "draw" for o in outcomes[-1].values())

    async def test_they_take_turns_and_only_the_one_to_move_sees_the_board(self) -> None:
        runner, outcomes = await self.game("A1")
        assert runner.active_agents == ("O",)
        assert outcomes[0]["X"].obs == ""
        assert outcomes[0]["O"].obs.startswith("You are O.")

    async def test_an_illegal_move_costs_its_player_and_voids_the_game(self) -> None:
        runner, outcomes = await self.game("A1", "A1", draw_reward=0.5, illegal_reward=-2.0)
        assert runner.done
        assert (outcomes[-1]["O"].reward, outcomes[-1]["X"].reward) == (-2.0, 0.5)
        assert outcomes[-1]["X"].info["result"] == "void"

    async def test_or_the_player_moves_again(self) -> None:
        runner, outcomes = await self.game("A1", "A1", illegal_ends=False)
        assert runner.active_agents == ("O",)
        assert set(outcomes[-1]) == {"O"}
        assert outcomes[-1]["O"].reward == -1.0

    @given(st.integers())
    def test_rewards_of_a_decided_game_add_up_to_zero(self, moves: int) -> None:
        random = Random(moves)
        env = TwoPlayerTicTacToeEnv()
        env.reset(seed=0)
        totals = {"X": 0.0, "O": 0.0}
        while env.active_agents:
            mover = env.active_agents[0]
            cell = CELLS[random.choice(free_cells(env.board))]
            for mark, step in env.step({mover: cell}).items():
                totals[mark] += step.reward
        assert totals["X"] + totals["O"] == 0.0
        assert totals["X"] == {"X": 1.0, "O": -1.0, None: 0.0}[winner(env.board)]

    def test_stepping_after_the_end_is_refused(self) -> None:
        with pytest.raises(EnvError, match="reset it first"):
            TwoPlayerTicTacToeEnv().step({"X": "A1"})
