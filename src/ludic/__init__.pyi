from ludic.envs.env import LudicEnv as LudicEnv
from ludic.envs.single_agent_env import SingleAgentEnv as SingleAgentEnv
from ludic.parsers import boxed_parser as boxed_parser
from ludic.parsers import compose_parsers as compose_parsers
from ludic.parsers import json_parser as json_parser
from ludic.parsers import regex_parser as regex_parser
from ludic.parsers import text_parser as text_parser
from ludic.parsers import think_prefix_parser as think_prefix_parser
from ludic.parsers import xml_parser as xml_parser
from ludic.registry import get_tool as get_tool
from ludic.registry import list_agents as list_agents
from ludic.registry import list_envs as list_envs
from ludic.registry import list_protocols as list_protocols
from ludic.registry import list_tools as list_tools
from ludic.registry import make_agent as make_agent
from ludic.registry import make_env as make_env
from ludic.registry import make_protocol as make_protocol
from ludic.registry import register_agent as register_agent
from ludic.registry import register_algorithm as register_algorithm
from ludic.registry import register_env as register_env
from ludic.registry import register_parser as register_parser
from ludic.registry import register_protocol as register_protocol
from ludic.registry import register_tool as register_tool
from ludic.runs.front_door import evaluate as evaluate
from ludic.runs.front_door import play as play
from ludic.runs.front_door import resume as resume
from ludic.runs.front_door import sft as sft
from ludic.runs.front_door import train as train
from ludic.runs.run import Run as Run
from ludic.seeding import derive_seed as derive_seed
from ludic.training.algorithms.cispo import make_cispo
from ludic.training.algorithms.dr_grpo import make_dr_grpo
from ludic.training.algorithms.gmpo import make_gmpo
from ludic.training.algorithms.grpo import make_grpo
from ludic.training.algorithms.gspo import make_gspo
from ludic.training.algorithms.opd import make_opd
from ludic.training.algorithms.reinforce import make_reinforce
from ludic.training.algorithms.reinforce_baseline import make_reinforce_baseline
from ludic.training.algorithms.sapo import make_sapo
from ludic.training.algorithms.scalerl import make_scalerl
from ludic.training.algorithms.spo import make_spo
from ludic.types import AgentStep as AgentStep
from ludic.types import ChatResponse as ChatResponse
from ludic.types import EnvironmentStep as EnvironmentStep
from ludic.types import EnvSpec as EnvSpec
from ludic.types import Message as Message
from ludic.types import ProtocolSpec as ProtocolSpec
from ludic.types import Rollout as Rollout
from ludic.types import Step as Step
from ludic.types import StepOutcome as StepOutcome
from ludic.types import TokenTrace as TokenTrace

cispo = make_cispo
dr_grpo = make_dr_grpo
gmpo = make_gmpo
grpo = make_grpo
gspo = make_gspo
opd = make_opd
reinforce = make_reinforce
reinforce_baseline = make_reinforce_baseline
sapo = make_sapo
scalerl = make_scalerl
spo = make_spo

__version__: str
