"""A grid world seen through a small window: find the key, open the door, reach the goal."""

from __future__ import annotations

import math
import secrets
from collections import deque
from dataclasses import KW_ONLY, dataclass
from random import Random
from typing import ClassVar, TypeAlias

from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.errors import ConfigError, EnvError
from ludic.seeding import derive_seed
from ludic.types import Action, Info, Obs, StepOutcome

Cell: TypeAlias = tuple[int, int]
"""Column and row; (0, 0) is the north-west corner."""

MOVES = {"north": (0, -1), "south": (0, 1), "west": (-1, 0), "east": (1, 0)}

_PROMPT = (
    "You walk on a grid and see only the cells around you. @ is you, # a wall, . floor, K the "
    "key, D the locked door, G the goal. Walk over the key to take it; with the key you can walk "
    "through the door; reach the goal. Answer with one of: north, south, west, east."
)


@dataclass(frozen=True, slots=True)
class Level:
    """One level: two rooms side by side, with the only door in the wall between them."""

    width: int
    height: int
    walls: frozenset[Cell]
    start: Cell
    key: Cell
    door: Cell
    goal: Cell

    def next_cell(self, cell: Cell, has_key: bool, move: str) -> Cell:
        """Where a move leads: walls, the edge, and the door without the key stop it."""
        dx, dy = MOVES[move]
        ahead = (cell[0] + dx, cell[1] + dy)
        inside = 0 <= ahead[0] < self.width and 0 <= ahead[1] < self.height
        if not inside or ahead in self.walls or (ahead == self.door and not has_key):
            return cell
        return ahead

    def shortest_solution(self) -> tuple[str, ...] | None:
        """The fewest moves from the start to the goal, by breadth-first search over the place and
        whether the key is held; None if there is no way."""
        start = (self.start, self.start == self.key)
        ways: dict[tuple[Cell, bool], tuple[str, ...]] = {start: ()}
        queue = deque([start])
        while queue:
            cell, has_key = state = queue.popleft()
            if cell == self.goal:
                return ways[state]
            for move in MOVES:
                ahead = self.next_cell(cell, has_key, move)
                reached = (ahead, has_key or ahead == self.key)
                if reached not in ways:
                    ways[reached] = (*ways[state], move)
                    queue.append(reached)
        return None


@dataclass(eq=False, repr=False)
class KeyDoorEnv(SingleAgentEnv):
    """The agent sees `view` cells to each side and must remember the rest.

    Every step costs `step_cost`; the goal earns `goal_reward` and ends the episode. A move into a
    wall, or an action that is not a direction, leaves the agent where it is and costs the same.
    After `max_steps` steps the episode is truncated. `optimal_return(seed)` is the return of the
    shortest solution, which no policy can beat.

    Args:
        width: Columns, the wall between the rooms included.
        height: Rows.
        view: How far the agent sees to each side.
        wall_density: How much of each room is wall.
        max_steps: None means four steps for each cell.
    """

    blocking: ClassVar[bool] = False

    _: KW_ONLY
    width: int = 7
    height: int = 5
    view: int = 1
    wall_density: float = 0.1
    goal_reward: float = 1.0
    step_cost: float = 0.01
    max_steps: int | None = None

    def __post_init__(self) -> None:
        width, height, view = self.width, self.height, self.view
        step_cost, goal_reward = self.step_cost, self.goal_reward
        if width < 3 or height < 2 or width * height > 10_000:
            raise ConfigError(
                f"KeyDoorEnv({width=}, {height=}): at least 3 x 2 cells, at most 10,000 in all"
            )
        self._limit = 4 * width * height if self.max_steps is None else self.max_steps
        if self._limit < 1:
            raise ConfigError(f"KeyDoorEnv(max_steps={self._limit}): must be at least 1")
        if not 0 <= self.wall_density <= 0.5:
            raise ConfigError(f"KeyDoorEnv(wall_density={self.wall_density}): must be in [0, 0.5]")
        if view < 1 or not (0 <= step_cost < math.inf and 0 < goal_reward < math.inf):
            raise ConfigError(
                f"KeyDoorEnv({view=}, {step_cost=}, {goal_reward=}): view must be at least 1, "
                "step_cost finite and not negative, goal_reward finite and positive"
            )
        self._level: Level
        self._cell: Cell = (0, 0)
        self._has_key = False
        self._steps = 0

    @property
    def return_range(self) -> tuple[float, float]:
        """The lowest and the highest return of an episode."""
        return -self.step_cost * self._limit, self.goal_reward - self.step_cost

    def level(self, seed: int) -> Level:
        """The level that `seed` stands for: the first solvable one of its draws."""
        for draw in range(100):
            # Later draws have fewer walls, so that one of them has a way through.
            density = self.wall_density * (1 - draw / 50) if draw < 50 else 0.0
            random = Random(derive_seed(seed, "level", draw))
            level = _draw_level(random, self.width, self.height, density)
            if level is not None and level.shortest_solution() is not None:
                return level
        raise EnvError(
            f"KeyDoorEnv could not make a solvable level for seed {seed}; use a larger grid"
        )

    def optimal_return(self, seed: int) -> float:
        """The highest return that the level of `seed` allows, with full knowledge of it."""
        solution = self.level(seed).shortest_solution()
        assert solution is not None
        if len(solution) > self._limit:
            return -self.step_cost * self._limit
        return self.goal_reward - self.step_cost * len(solution)

    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        self._level = self.level(secrets.randbits(63) if seed is None else seed)
        self._cell = self._level.start
        self._has_key = False
        self._steps = 0
        return self.env_current_obs(), {}

    def env_step(self, action: Action) -> StepOutcome:
        self._steps += 1
        note = self._move(action.strip().lower() if len(action) < 100 else "")
        reached = self._cell == self._level.goal
        return StepOutcome(
            f"{note}\n{self.env_current_obs()}",
            (self.goal_reward if reached else 0.0) - self.step_cost,
            terminated=reached,
            truncated=not reached and self._steps >= self._limit,
            info={"steps": self._steps, "has_key": self._has_key},
        )

    def env_current_obs(self) -> Obs:
        x, y = self._cell
        reach = range(-self.view, self.view + 1)
        rows = ("".join(self._drawn((x + dx, y + dy)) for dx in reach) for dy in reach)
        holding = "You have the key." if self._has_key else "You have no key."
        return "\n".join(rows) + f"\n{holding}"

    def suggested_sysprompt(self, agent_id: str) -> str | None:
        return _PROMPT

    def _move(self, move: str) -> str:
        if move not in MOVES:
            return "That is no direction."
        before = self._cell
        self._cell = self._level.next_cell(before, self._has_key, move)
        if self._cell == self._level.goal:
            return "You reached the goal."
        if self._cell == self._level.key and not self._has_key:
            self._has_key = True
            return "You took the key."
        if self._cell != before:
            return f"You went {move}."
        dx, dy = MOVES[move]
        locked = (before[0] + dx, before[1] + dy) == self._level.door
        return "The door is locked." if locked else "You cannot go there."

    def _drawn(self, cell: Cell) -> str:
        level = self._level
        if cell == self._cell:
            return "@"
        if not (0 <= cell[0] < level.width and 0 <= cell[1] < level.height) or cell in level.walls:
            return "#"
        if cell == level.key and not self._has_key:
            return "K"
        return {level.door: "D", level.goal: "G"}.get(cell, ".")


def _draw_level(random: Random, width: int, height: int, density: float) -> Level | None:
    divide = random.randrange(1, width - 1)
    door = (divide, random.randrange(height))
    walls = {(divide, y) for y in range(height)} - {door}
    free: tuple[list[Cell], list[Cell]] = ([], [])
    for x in range(width):
        for y in range(height):
            if x != divide:
                if random.random() < density:
                    walls.add((x, y))
                else:
                    free[x > divide].append((x, y))
    first, second = free if random.random() < 0.5 else free[::-1]
    if len(first) < 2 or not second:
        return None
    start, key = random.sample(first, 2)
    goal = random.choice(second)
    return Level(width, height, frozenset(walls), start, key, door, goal)
