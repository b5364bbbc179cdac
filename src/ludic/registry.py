"""Everything that a run file can name: environments, agents, protocols, programs, tools, bots,
parsers, rewards, contexts, tool parsers, algorithms, aggregations, corrections, filters and
loggers.

`builtins.toml` lists what is built in; nothing is imported before it is asked for. Scripts add
their own with `register_env` and its siblings, and installed packages announce theirs as entry
points in the groups `ludic.envs`, `ludic.agents` and so on. Anything else is named by its place,
`my_module:MyEnv`.

>>> @register_env("coin", description="Call heads or tails.")
... class CoinEnv: ...
>>> isinstance(make_env("coin"), CoinEnv)
True
>>> unregister_env("coin")
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from ludic.plumbing.naming import Entry as Entry
from ludic.plumbing.naming import Registry as Registry
from ludic.plumbing.naming import names_are_stored as names_are_stored
from ludic.plumbing.naming import stored_names as stored_names

_BUILT_IN = tomllib.loads(Path(__file__).with_name("builtins.toml").read_text(encoding="utf-8"))


def _registry(kind: str, group: str, base: str = "") -> Registry:
    entries = {name: Entry(*entry) for name, entry in _BUILT_IN.get(group, {}).items()}
    return Registry(kind, entries, group, base)


ENVS = _registry("environment", "ludic.envs", "ludic.envs.env:LudicEnv")
AGENTS = _registry("agent", "ludic.agents", "ludic.agents:Agent")
PROTOCOLS = _registry("protocol", "ludic.protocols", "ludic.interaction.base:InteractionProtocol")
PROGRAMS = _registry("program", "ludic.programs")
TOOLS = _registry("tool", "ludic.tools")
BOTS = _registry("bot", "ludic.bots")
PARSERS = _registry("parser", "ludic.parsers")
REWARDS = _registry("reward", "ludic.rewards")
CONTEXTS = _registry("context", "ludic.contexts")
TOOL_PARSERS = _registry("tool parser", "ludic.tool_parsers")
ALGORITHMS = _registry("algorithm", "ludic.algorithms")
AGGREGATIONS = _registry("aggregation", "ludic.aggregations")
CORRECTIONS = _registry("correction", "ludic.corrections")
FILTERS = _registry("filter", "ludic.filters")
LOGGERS = _registry("logger", "ludic.loggers")

register_env, unregister_env = ENVS.register, ENVS.unregister
register_agent, unregister_agent = AGENTS.register, AGENTS.unregister
register_protocol, unregister_protocol = PROTOCOLS.register, PROTOCOLS.unregister
register_tool, unregister_tool = TOOLS.register, TOOLS.unregister
register_program = PROGRAMS.register
register_parser, register_reward = PARSERS.register, REWARDS.register
register_bot = BOTS.register
register_context, register_tool_parser = CONTEXTS.register, TOOL_PARSERS.register
register_algorithm, register_aggregation = ALGORITHMS.register, AGGREGATIONS.register
register_correction, register_filter = CORRECTIONS.register, FILTERS.register
register_logger, unregister_logger = LOGGERS.register, LOGGERS.unregister
list_envs, list_agents = ENVS.describe, AGENTS.describe
list_protocols, list_tools = PROTOCOLS.describe, TOOLS.describe
list_algorithms, list_tool_parsers = ALGORITHMS.describe, TOOL_PARSERS.names
make_env, make_agent = ENVS.make, AGENTS.make
make_protocol = PROTOCOLS.make  # called as make_protocol(name, runtime, **kwargs)
get_tool = TOOLS.get  # the function itself
