"""Everything that a run file can name: environments, agents, protocols, programs, tools, bots,
parsers, rewards, contexts, tool parsers, algorithms, aggregations, corrections, filters and
loggers.

The tables list what is built in; nothing is imported before it is asked for. Scripts add
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

from ludic.plumbing.naming import Entry as Entry
from ludic.plumbing.naming import Registry as Registry
from ludic.plumbing.naming import names_are_stored as names_are_stored
from ludic.plumbing.naming import stored_names as stored_names

ENVS = Registry(
    "environment",
    {
        "tic_tac_toe": Entry(
            "ludic.envs.tic_tac_toe:TicTacToeEnv",
            "Tic-Tac-Toe against a seeded opponent: random, perfect or mixed.",
        ),
        "tic_tac_toe_two_player": Entry(
            "ludic.envs.tic_tac_toe:TwoPlayerTicTacToeEnv",
            "Tic-Tac-Toe with an agent on each side, for self-play.",
        ),
        "dataset_qa": Entry(
            "ludic.envs.dataset_qa_env:DatasetQAEnv",
            "One question from a dataset, one judged answer.",
        ),
        "gsm8k": Entry(
            "ludic.envs.dataset_qa_env:GSM8KEnv",
            "Grade-school word problems, judged by the number.",
        ),
        "math": Entry(
            "ludic.envs.dataset_qa_env:MATHEnv",
            "Competition problems, judged by symbolic equality.",
        ),
        "code_exec": Entry(
            "ludic.envs.code_exec:CodeExecEnv",
            "Programming tasks: answers run in a sandbox, tests give the reward.",
        ),
        "key_door": Entry(
            "ludic.envs.key_door:KeyDoorEnv",
            "A grid world seen in part: find the key, open the door.",
        ),
        "gameboy": Entry(
            "ludic.envs.gameboy:GameBoyEnv",
            "A game of the Game Boy, from your ROM and a file that describes it.",
        ),
        "rustorio": Entry(
            "ludic.envs.rustorio:RustorioEnv",
            "A factory game whose rules are Rust's types, played by writing programs.",
        ),
        "gymnasium": Entry(
            "ludic.envs.adapters.gymnasium:GymnasiumEnv",
            "An environment of Gymnasium by its id, with words for actions.",
        ),
        "textarena": Entry(
            "ludic.envs.adapters.textarena:TextArenaEnv",
            "A game of TextArena by its id, for one player or several.",
        ),
        "reasoning_gym": Entry(
            "ludic.envs.adapters.reasoning_gym:ReasoningGymEnv",
            "A task of reasoning-gym by its name, judged by its own scoring.",
        ),
        "verifiers": Entry(
            "ludic.envs.adapters.verifiers:VerifiersEnv",
            "An environment of verifiers 0.3 by its id: its turns, tools and rubric.",
        ),
    },
    "ludic.envs",
    base="ludic.envs.env:LudicEnv",
)
AGENTS = Registry(
    "agent",
    {
        "agent": Entry("ludic.agents:Agent", "One model call per turn."),
        "tool": Entry("ludic.agents:ToolAgent", "A model that may call tools before it acts."),
        "react": Entry(
            "ludic.agents:ReActAgent", "A bounded loop of tool calls whose last round answers."
        ),
        "harness": Entry(
            "ludic.agents:HarnessAgent", "For long play: tools, notes, a reminder when it is stuck."
        ),
        "program": Entry(
            "ludic.agents.programs:ProgramAgent",
            "A program that asks the model by the chat completions API.",
        ),
    },
    "ludic.agents",
    base="ludic.agents:Agent",
)
PROTOCOLS = Registry(
    "protocol",
    {
        "single_agent": Entry(
            "ludic.interaction.factories:single_agent_protocol", "One agent, one environment."
        ),
        "multi_agent": Entry(
            "ludic.interaction.multi_agent:multi_agent_protocol",
            "Several seats, in turns or at once; some may be bots or other models.",
        ),
        "delegating": Entry(
            "ludic.interaction.delegating:delegating_protocol",
            "A parent hands subtasks to sub-agents; all their rollouts are linked.",
        ),
        "program": Entry(
            "ludic.interaction.program:program_protocol",
            "A program does the task; the environment or a reward function judges it.",
        ),
    },
    "ludic.protocols",
    base="ludic.interaction.base:InteractionProtocol",
)
PROGRAMS = Registry("program", {}, "ludic.programs")
TOOLS = Registry(
    "tool",
    {
        "python": Entry(
            "ludic.envs.code_exec.tools:PythonTool",
            "Runs Python code in a sandbox, in a session that keeps its state.",
        ),
        "calculator": Entry(
            "ludic.envs.code_exec.tools:calculator", "Computes an arithmetic expression."
        ),
    },
    "ludic.tools",
)
BOTS = Registry(
    "bot",
    {
        "random": Entry(
            "ludic.interaction.multi_agent:RandomBot", "One of its choices, at random."
        ),
        "sequence": Entry("ludic.interaction.multi_agent:SequenceBot", "A fixed list of actions."),
    },
    "ludic.bots",
)
PARSERS = Registry(
    "parser",
    {
        "text": Entry("ludic.parsers:text_parser", "The whole answer is the action."),
        "xml": Entry("ludic.parsers:xml_parser", "The action stands in <tag>...</tag>."),
        "think_prefix": Entry(
            "ludic.parsers:think_prefix_parser", "<think>...</think>, and then the action."
        ),
        "boxed": Entry("ludic.parsers:boxed_parser", "The action stands in the last \\boxed{...}."),
        "json": Entry("ludic.parsers:json_parser", "The answer is a JSON object."),
        "regex": Entry("ludic.parsers:regex_parser", "The action is what a pattern matches."),
    },
    "ludic.parsers",
)
REWARDS = Registry(
    "reward",
    {
        "exact": Entry("ludic.rewards:exact_reward", "1 for the target itself."),
        "numeric": Entry("ludic.rewards:numeric_reward", "1 for the target's number."),
        "symbolic": Entry("ludic.rewards:symbolic_reward", "1 for an equal expression."),
        "format": Entry("ludic.rewards:format_reward", "1 for what a parser can read."),
        "length": Entry("ludic.rewards:length_reward", "1 for short answers, 0 for long ones."),
        "judge": Entry("ludic.inference.judge:server_judge", "What a model behind a server says."),
    },
    "ludic.rewards",
)
CONTEXTS = Registry(
    "context",
    {
        "full_dialog": Entry("ludic.context:FullDialog", "The whole dialogue, as it was."),
        "truncated_thinking": Entry(
            "ludic.context:TruncatedThinkingContext", "Earlier turns without their thinking."
        ),
        "windowed": Entry("ludic.context:WindowedDialog", "The last few turns."),
        "compacting": Entry(
            "ludic.context:CompactingDialog", "A summary by the model, when the window is full."
        ),
    },
    "ludic.contexts",
)
TOOL_PARSERS = Registry(
    "tool parser",
    {
        "hermes": Entry(
            "ludic.inference.templates.tool_parsers:HermesToolParser",
            "Calls as JSON between <tool_call> and </tool_call>.",
        ),
        "json": Entry(
            "ludic.inference.templates.tool_parsers:JSONToolParser", "Calls as plain JSON."
        ),
    },
    "ludic.tool_parsers",
)
ALGORITHMS = Registry(
    "algorithm",
    {
        name: Entry(f"ludic.training.algorithms.{name}:make_{name}", description)
        for name, description in {
            "reinforce": "the policy gradient with Monte Carlo returns",
            "reinforce_baseline": "REINFORCE minus the batch's mean return",
            "grpo": "group-relative advantages, PPO's clip per token",
            "dr_grpo": "GRPO without division by std or length",
            "gspo": "one clipped ratio per sequence",
            "cispo": "capped importance weights, no token loses its gradient",
            "sapo": "a soft gate instead of the clip",
            "gmpo": "the geometric mean of clipped ratios",
            "scalerl": "CISPO, hybrid-normalised credit, groups weighing the same",
            "spo": "no groups: a tracked value per task as the baseline",
            "opd": "distillation from a teacher on the student's own samples",
            "sft": "weighted log-likelihood of recorded actions",
        }.items()
    },
    "ludic.algorithms",
)
AGGREGATIONS = Registry(
    "aggregation",
    {
        name: Entry(f"ludic.training.losses.aggregation:{kind}", description)
        for name, kind, description in (
            ("token_mean", "TokenMean", "Every action token weighs the same."),
            ("sequence_mean", "SequenceMean", "Every turn, or rollout, weighs the same."),
            ("group_mean", "GroupMean", "Every group weighs the same."),
            ("constant", "Constant", "The sum over tokens, divided by a fixed length."),
        )
    },
    "ludic.aggregations",
)
CORRECTIONS = Registry(
    "correction",
    {
        "truncated_importance": Entry(
            "ludic.training.losses.corrections:TruncatedImportance",
            "The ratio of trainer and sampler, cut at a bound.",
        ),
        "masked_importance": Entry(
            "ludic.training.losses.corrections:MaskedImportance",
            "That ratio within bounds, and nothing outside.",
        ),
    },
    "ludic.corrections",
)
FILTERS = Registry(
    "filter",
    {
        name: Entry(f"ludic.saw.filters:{name}", description)
        for name, description in {
            "drop_truncated": "Every turn of an episode that a limit cut short.",
            "drop_incomplete_completions": "Turns with a model call that did not end by itself.",
            "drop_parse_errors": "Turns whose answer could not be parsed.",
            "drop_compactions": "The summaries by which dialogues were compacted.",
            "drop_overlong": "Turns longer than `max_seq_len` tokens.",
        }.items()
    },
    "ludic.filters",
)

LOGGERS = Registry(
    "logger",
    {
        name: Entry(f"ludic.training.metrics.loggers:{kind}", description)
        for name, kind, description in (
            ("live", "RichLiveLogger", "Curves that are drawn in place on the terminal."),
            ("console", "ConsoleLogger", "A line on the terminal, now and then."),
            ("wandb", "WandbLogger", "A run of Weights & Biases."),
            ("tensorboard", "TensorBoardLogger", "An event file for TensorBoard."),
            ("trackio", "TrackioLogger", "A run of trackio, on this machine."),
        )
    },
    "ludic.loggers",
)

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
