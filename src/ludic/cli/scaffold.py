"""`ludic init`: a package with an environment, its test, and a run file that trains at once."""

from __future__ import annotations

import keyword
from pathlib import Path

from ludic.errors import ConfigError
from ludic.registry import list_envs

PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{dashed}"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["ludic-rl"]

# Once the package is installed, every run file can say kind = "{name}".
[project.entry-points."ludic.envs"]
{name} = "{name}:{cls}"

[tool.setuptools]
py-modules = ["{name}"]
"""

ENVIRONMENT = '''\
"""An environment: the agent is shown two digits and answers with the larger one."""

from random import Random

from ludic.envs import SingleAgentEnv
from ludic.types import StepOutcome


class {cls}(SingleAgentEnv):
    """Name the larger of two digits."""

    blocking = False  # it answers at once, so it needs no thread of its own

    def env_reset(self, *, seed=None):
        self.a, self.b = Random(seed).sample(range(10), 2)
        return self.env_current_obs(), {{}}

    def env_step(self, action):
        right = action.strip() == str(max(self.a, self.b))
        return StepOutcome(
            obs="Right." if right else "Wrong.",
            reward=1.0 if right else 0.0,
            terminated=True,
            info={{"result": "right" if right else "wrong"}},
        )

    def env_current_obs(self):
        return f"{{self.a}} or {{self.b}}?"

    def suggested_sysprompt(self, agent_id):
        return "Name the larger digit."


def teacher(obs, rng):
    """Shows the form of an answer, not its substance: one of the two digits, at random."""
    return f"<answer>{{rng.choice([obs[0], obs[5]])}}</answer>"
'''

TEST = '''\
"""The environment keeps its promises: seeds decide, and the larger digit wins."""

from random import Random

from {name} import {cls}, teacher


def test_a_seed_gives_the_same_question_again():
    env = {cls}()
    assert env.env_reset(seed=7) == env.env_reset(seed=7)


def test_the_larger_digit_is_right_and_the_smaller_one_is_not():
    env = {cls}()
    env.env_reset(seed=7)
    assert env.env_step(str(max(env.a, env.b))).reward == 1.0
    env.env_reset(seed=7)
    assert env.env_step(str(min(env.a, env.b))).reward == 0.0


def test_the_teacher_answers_in_the_form_that_the_run_file_asks_for():
    obs, _ = {cls}().env_reset(seed=7)
    assert teacher(obs, Random(0)).startswith("<answer>")
'''

RUN = """\
# Train with `ludic train run.toml`; change anything with `ludic train run.toml section.key=value`.

[run]
name = "{name}"
seed = 0
threads = 1                     # with the seed, fixes every bit of a run on the CPU

[model]
name = "tiny"                   # the embedded model; or a folder, or a name on the hub

[model.kwargs]                  # of the tiny model; without them, every byte is a token
initializer_range = 0.1
words = [                       # whole tokens, which keep its texts short
  "system\\n", "user\\n", "assistant\\n",
  "Name the larger digit.", " or ", "<answer>", "</answer>",
]

[inference]
max_context_tokens = 64         # prompt and answer together

[env]
kind = "{name}:{cls}"           # or just "{name}", once the package is installed

[protocol]
kind = "single_agent"
kwargs = {{ parser = {{ kind = "xml", tag = "answer", error_reward = -0.1 }} }}

[inference.sampling]
temperature = 1.0
max_tokens = 6

[sft]                           # a cold start: the tiny model knows no form yet
teacher = "{name}:teacher"
examples = 1000
steps = 120
learning_rate = 3e-3

[algorithm]
name = "grpo"
kwargs = {{ group_size = 8 }}

[training]
steps = 60
rollouts_per_update = 64
learning_rate = 1e-3
max_steps = 1                   # environment steps per episode
max_seq_len = 256

[eval]
episodes = 400
outcomes = ["right", "wrong"]   # what the environment calls its endings; the first one counts
"""

README = """\
# {name}

    pytest                      # the environment's own tests
    ludic play {name}:{cls}     # try it by hand
    ludic train run.toml        # cold start, reinforcement, evaluation
"""


def write(name: str, where: Path) -> str:
    """Writes the package `name` under `where`; answers what to do next."""
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        raise ConfigError(f"{name!r} is no name for a Python package: use letters such as my_env")
    if name in list_envs():
        raise ConfigError(f"an environment {name!r} exists already: choose another name")
    folder = where / name
    if folder.exists():
        raise ConfigError(f"{folder} exists already: choose another name, or remove it")
    cls = "".join(part.capitalize() for part in name.split("_"))
    values = {"name": name, "cls": cls, "dashed": name.replace("_", "-")}
    folder.mkdir(parents=True)
    for path, text in {
        "pyproject.toml": PYPROJECT,
        f"{name}.py": ENVIRONMENT,
        f"test_{name}.py": TEST,
        "run.toml": RUN,
        "README.md": README,
    }.items():
        (folder / path).write_text(text.format(**values), encoding="utf-8")
    return (
        f"wrote {name}/: the environment in {name}.py, its test, and run.toml\n"
        f"next: cd {name} && ludic train run.toml"
    )
