"""Every name and path that the founding documents promise is there, or is listed as to come.

A target is a path in the repository (`examples/gsm8k/`), a module (`ludic.parsers`), a name in a
module (`ludic.types:Rollout`), a part of one (`ludic.envs.env:LudicEnv.reset`), or an argument of
a call (`ludic.training:make_grpo(group_size)`). `RENAMED` has what goes by another name here.
`STILL_TO_COME` only ever shrinks: an entry that exists by now fails the test.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

PROMISED: dict[str, tuple[str, ...]] = {
    "the layout": (
        "src/ludic/types.py",
        "src/ludic/envs/env.py",
        "src/ludic/envs/single_agent_env.py",
        "src/ludic/envs/dataset_qa_env.py",
        "src/ludic/envs/code_exec/",
        "src/ludic/agents/base_agent.py",
        "src/ludic/agents/tool_agent.py",
        "src/ludic/agents/react_agent.py",
        "src/ludic/context/base.py",
        "src/ludic/context/full_dialog.py",
        "src/ludic/context/truncated_thinking.py",
        "src/ludic/interaction/base.py",
        "src/ludic/interaction/single_agent.py",
        "src/ludic/interaction/multi_agent.py",
        "src/ludic/inference/client.py",
        "src/ludic/inference/vllm_client.py",
        "src/ludic/inference/vllm_server.py",
        "src/ludic/inference/sampling.py",
        "src/ludic/training/trainer.py",
        "src/ludic/training/algorithm.py",
        "src/ludic/training/config.py",
        "src/ludic/training/checkpoint.py",
        "ludic.training.credit_assignment",
        "src/ludic/training/types.py",
        "src/ludic/training/batching/",
        "src/ludic/training/batching/rollout_engine.py",
        "src/ludic/distributed/interfaces.py",
        "src/ludic/distributed/publisher.py",
        "src/ludic/eval/",
        "src/ludic/parsers.py",
        "ludic.training.loss",
        "ludic.training.filters",
        "ludic.inference.vllm_server",
        "tests/",
        "pyproject.toml",
        "CONSIDERATIONS.md",
    ),
    "the examples": (
        "examples/tic_tac_toe/train_tic_tac_toe.py",
        "examples/tic_tac_toe/sft_tic_tac_toe.py",
        "examples/tic_tac_toe/generate_synth_data.py",
        "examples/tic_tac_toe/eval_tic_tac_toe_vllm.py",
        "examples/gsm8k/train_gsm8k.py",
        "examples/gsm8k/eval_gsm8k_vllm.py",
        "examples/fsdp2_training/train_math_fsdp2.py",
        "examples/pipeline_rl/run_actor.py",
        "examples/pipeline_rl/run_trainer.py",
        "examples/code_exec/",
        "examples/rejection_sampling.py",
    ),
    "types": (
        "ludic.types:Message",
        "ludic.types:ChatResponse",
        "ludic.types:ChatResponse.finish_reason",
        "ludic.types:ChatResponse.text",
        "ludic.types:TokenTrace",
        "ludic.types:TokenTrace.prompt_token_ids",
        "ludic.types:TokenTrace.completion_token_ids",
        "ludic.types:StepOutcome.obs",
        "ludic.types:StepOutcome.reward",
        "ludic.types:StepOutcome.truncated",
        "ludic.types:StepOutcome.terminated",
        "ludic.types:StepOutcome.info",
        "ludic.types:Step",
        "ludic.types:AgentStep",
        "ludic.types:AgentStep.trace",
        "ludic.types:EnvironmentStep",
        "ludic.types:EnvironmentStep.agent_steps",
        "ludic.types:Rollout",
        "ludic.types:Rollout.steps",
        "ludic.types:AgentID",
        "ludic.types:Obs",
        "ludic.types:Info",
        "ludic.types:Action",
    ),
    "environments": (
        "ludic.envs:LudicEnv",
        "ludic.envs.env:LudicEnv.agent_ids",
        "ludic.envs.env:LudicEnv.active_agents",
        "ludic.envs.env:LudicEnv.reset(seed)",
        "ludic.envs.env:LudicEnv.step(actions)",
        "ludic.envs:SingleAgentEnv",
        "ludic.envs.single_agent_env:SingleAgentEnv.env_reset(seed)",
        "ludic.envs.single_agent_env:SingleAgentEnv.env_step(action)",
        "ludic.envs.single_agent_env:SingleAgentEnv.env_current_obs",
        "ludic.envs.single_agent_env:SingleAgentEnv.suggested_sysprompt",
        "ludic.envs:DatasetQAEnv",
        "ludic.envs.dataset_qa_env:DatasetQAEnv",
        "ludic.envs:TicTacToeEnv",
    ),
    "agents": (
        "ludic.agents:Agent",
        "ludic.agents.base_agent:Agent(client)",
        "ludic.agents.base_agent:Agent(model)",
        "ludic.agents.base_agent:Agent(ctx)",
        "ludic.agents.base_agent:Agent(parser)",
        "ludic.agents.base_agent:Agent(chat_template)",
        "ludic.agents.base_agent:Agent.act",
        "ludic.agents:ToolAgent",
        "ludic.agents.tool_agent:ToolAgent(tools)",
        "ludic.agents.tool_agent:ToolAgent(external_tools)",
        "ludic.agents.tool_agent:ToolAgent(external_tool_handler)",
        "ludic.agents:ReActAgent",
        "ludic.agents.react_agent:ReActAgent",
    ),
    "context": (
        "ludic.context:ContextStrategy",
        "ludic.context.base:ContextStrategy.reset(system_prompt)",
        "ludic.context.base:ContextStrategy.on_env_reset(obs)",
        "ludic.context.base:ContextStrategy.on_env_reset(info)",
        "ludic.context.base:ContextStrategy.on_before_act",
        "ludic.context.base:ContextStrategy.on_after_act",
        "ludic.context.base:ContextStrategy.on_after_step(obs)",
        "ludic.context.base:ContextStrategy.on_after_step(info)",
        "ludic.context:FullDialog",
        "ludic.context.full_dialog:FullDialog",
        "ludic.context:TruncatedThinkingContext",
        "ludic.context.truncated_thinking:TruncatedThinkingContext",
    ),
    "parsers": (
        "ludic.parsers:Parser",
        "ludic.parsers:ParseResult.action",
        "ludic.parsers:ParseResult.reward",
        "ludic.parsers:ParseResult.obs",
        "ludic.parsers:xml_parser(tag)",
        "ludic.parsers:xml_parser(exact)",
        "ludic.parsers:xml_parser(success_reward)",
        "ludic.parsers:xml_parser(error_reward)",
        "ludic.parsers:xml_tag_parser",
        "ludic.parsers:think_prefix_parser",
        "ludic.parsers:boxed_parser",
        "ludic.parsers:compose_parsers",
    ),
    "interaction": (
        "ludic.interaction:InteractionProtocol",
        "ludic.interaction.base:InteractionProtocol.run",
        "ludic.interaction:SingleAgentSyncProtocol",
        "ludic.interaction.single_agent:SingleAgentSyncProtocol",
        "ludic.interaction:MultiAgentProtocol",
        "ludic.interaction.multi_agent:MultiAgentProtocol",
        "ludic.interaction:DelegatingProtocol",
    ),
    "inference": (
        "ludic.inference:ChatClient",
        "ludic.inference.client:ChatClient.complete_tokens(request)",
        "ludic.inference.client:ChatClient.sync_weights(params)",
        "ludic.inference.client:ChatClient.sync_weights(timeout_s)",
        "ludic.inference.client:ChatClient.sync_weights(version)",
        "ludic.inference:VersionedClient",
        "ludic.inference.client:VersionedClient.get_policy_version",
        "ludic.inference:TokenCompletionRequest",
        "ludic.inference.client:TokenCompletionRequest(prompt_token_ids)",
        "ludic.inference:ToolRequest",
        "ludic.inference.client:ToolRequest(tools)",
        "ludic.inference:SamplingConfig",
        "ludic.inference.sampling:SamplingConfig",
        "ludic.inference:InferenceSpec",
        "ludic.inference:ChatTemplate",
        "ludic.inference:HFChatTemplate(tool_parser)",
        "ludic.inference:HermesToolParser",
        "ludic.inference:VLLMChatClient",
        "ludic.inference.vllm_client:VLLMChatClient",
        "ludic.inference:VLLMExtensions.extra_body_overrides",
    ),
    "rollouts": (
        "ludic.rollouts:RolloutRequest",
        "ludic.training:RolloutRequest",
        "ludic.rollouts.requests:RolloutRequest.env",
        "ludic.rollouts.requests:RolloutRequest.protocol",
        "ludic.rollouts.requests:RolloutRequest.env_seed",
        "ludic.rollouts.requests:RolloutRequest.sampling_seed",
        "ludic.rollouts.requests:RolloutRequest.inference",
        "ludic.rollouts.requests:RolloutRequest.num_episodes",
        "ludic.rollouts.requests:RolloutRequest.meta",
        "ludic.training:EnvSpec",
        "ludic.training:ProtocolSpec",
        "ludic.training:InferenceSpec",
        "ludic.training:RolloutEngine(env_registry)",
        "ludic.training:RolloutEngine(protocol_registry)",
        "ludic.training.batching.rollout_engine:RolloutEngine.generate_rollouts(requests)",
        "ludic.training.batching.rollout_engine:RolloutEngine.generate_rollouts(max_steps)",
        "ludic.training.batching.rollout_engine:RolloutEngine.generate_rollouts(concurrency)",
        "ludic.training.batching.rollout_engine:RolloutEngine.generate_batch(requests)",
        "ludic.training.batching.rollout_engine:RolloutEngine.generate_batch(algorithm)",
        "ludic.training.batching.rollout_engine:RolloutEngine.generate_batch(sample_filter)",
        "ludic.training:GRPORequestStrategy(group_size)",
        "ludic.training:IdentityStrategy",
    ),
    "state, action, weight": (
        "ludic.saw:SAWItem",
        "ludic.training:SAWItem.input_ids",
        "ludic.training:SAWItem.attention_mask",
        "ludic.training:SAWItem.action_mask",
        "ludic.training:SAWItem.weight",
        "ludic.training:SAWItem.meta",
        "ludic.training:SAWItem.attachments",
        "ludic.training:SampleAttachments",
        "ludic.training:SAWBatch",
        "ludic.training:SampleFilter",
        "ludic.training.filters:drop_truncated",
        "ludic.training.filters:drop_incomplete_completions",
        "ludic.training.filters:drop_parse_errors",
        "ludic.training.filters:combine",
    ),
    "credit": (
        "ludic.training:CreditAssigner.compute(rollouts)",
        "ludic.training:RolloutStepKey",
        "ludic.training.credit_assignment:MonteCarloReturn",
        "ludic.training.credit_assignment:GroupNormalizedReturn",
        "ludic.training.credit_assignment:HybridNormalizedReturn",
        "ludic.training.credit_assignment:ConstantCredit",
    ),
    "losses": (
        "ludic.training:Loss.compute",
        "ludic.training.loss:ReinforceLoss",
        "ludic.training.loss:ReinforceBaselineLoss",
        "ludic.training.loss:TokenClippedSurrogateLoss",
        "ludic.training.loss:CISPOLoss",
        "ludic.training.loss:TokenKLLoss",
        "ludic.training.loss:MaskedCausalLMCrossEntropyLoss",
        "ludic.training.loss:CompositeLoss",
    ),
    "algorithms": (
        "ludic.training:RLAlgorithm.name",
        "ludic.training:RLAlgorithm.credit_assigner",
        "ludic.training:RLAlgorithm.loss",
        "ludic.training:RLAlgorithm.preprocess",
        "ludic.training:PreprocessFn",
        "ludic.training:make_reinforce(gamma)",
        "ludic.training:make_reinforce_baseline",
        "ludic.training:make_grpo(group_size)",
        "ludic.training:make_dr_grpo",
        "ludic.training:make_gspo",
        "ludic.training:make_cispo(group_size)",
        "ludic.training:make_cispo(kl_coeff)",
        "ludic.training:make_sapo",
        "ludic.training:make_gmpo(group_size)",
        "ludic.training:make_scalerl(group_size)",
        "ludic.training:make_scalerl(filter_zvp)",
        "ludic.training:make_spo",
        "ludic.training:make_opd",
        "ludic.training:make_sft",
    ),
    "training": (
        "ludic.training:Trainer(model)",
        "ludic.training:Trainer(algo)",
        "ludic.training:Trainer(batch_source)",
        "ludic.training:Trainer(publisher)",
        "ludic.training:Trainer(cfg)",
        "ludic.training:Trainer.train(num_steps)",
        "ludic.training:TrainerConfig(learning_rate)",
        "ludic.training:TrainerConfig(max_seq_len)",
        "ludic.training:TrainerConfig(micro_token_budget)",
        "ludic.training:BatchSource",
        "ludic.training.types:BatchSource.next_batch",
        "ludic.training:RolloutBatchSource(engine)",
        "ludic.training:RolloutBatchSource(request_fn)",
        "ludic.training:RolloutBatchSource(algorithm)",
        "ludic.training:RolloutBatchSource(max_steps)",
        "ludic.training:OfflineBatchSource",
        "ludic.pipeline:PipelineBatchSource",
        "ludic.training:PipelineBatchSource",
        "ludic.pipeline:run_pipeline_actor",
    ),
    "publishing": (
        "ludic.distributed:PolicyPublisher",
        "ludic.distributed.interfaces:PolicyPublisher.publish(version)",
        "ludic.distributed:BroadcastPolicyPublisher",
        "ludic.distributed.publisher:BroadcastPolicyPublisher",
        "ludic.distributed:Rank0OnlyPublisher",
    ),
    "evaluation": ("ludic.eval:Evaluator",),
    "the registry": (
        "ludic.registry:register_env",
        "ludic.registry:register_agent",
        "ludic.registry:register_protocol",
        "ludic.registry:make_env",
        "ludic.registry:make_agent",
        "ludic.registry:make_protocol",
    ),
}

RENAMED: dict[str, str] = {
    "ChatClient.complete": "ludic.inference.client:ChatClient.complete_tokens",
    "ChatCompletionRequest": "ludic.inference.client:TokenCompletionRequest",
    "batch_source.get_next_batch": "ludic.training.types:BatchSource.next_batch",
    "environments/": "src/ludic/envs/",
    "scripts/": "src/ludic/cli/",
    "scripts/calibrate_micro_batch.py": "src/ludic/cli/looking.py",
    "scripts/push_to_hub.py": "src/ludic/cli/looking.py",
    "scripts/README.md": "docs/cli.md",
    "data/ (made by the examples)": "examples/tic_tac_toe/generate_synth_data.py",
    "rollouts_per_update": "ludic.training:RLAlgorithm.check_rollouts_per_update",
    "uv.lock": "constraints.txt",
}

STILL_TO_COME: dict[str, str] = {}


def find(target: str) -> None:
    """Raises an error that says why `target` is not there."""
    if "/" in target or target.endswith((".md", ".toml", ".txt")):
        path = ROOT / target
        assert path.is_dir() if target.endswith("/") else path.is_file(), "no such file"
        return
    module, _, rest = target.partition(":")
    thing: Any = importlib.import_module(module)
    name, _, argument = rest.removesuffix(")").partition("(")
    for part in filter(None, name.split(".")):
        thing = attribute(thing, part)
    if argument:
        names = inspect.signature(thing).parameters
        assert argument in names, f"takes {', '.join(names)}"


def attribute(thing: Any, name: str) -> Any:
    """`thing.name`; for a class also what only its instances have."""
    if hasattr(thing, name):
        return getattr(thing, name)
    if dataclasses.is_dataclass(thing) and name in {f.name for f in dataclasses.fields(thing)}:
        return None
    raise AttributeError(f"{thing!r} has no {name!r}")


def problem(target: str) -> str | None:
    """Why `target` is not there; None when it is."""
    try:
        find(target)
    except (AssertionError, AttributeError, ImportError) as exc:
        return f"{target}: {exc}"
    return None


ALL = [target for targets in PROMISED.values() for target in targets] + list(RENAMED.values())


@pytest.mark.parametrize("part", [*PROMISED, "what has another name"])
def test_every_promised_name_is_there_or_listed_as_to_come(part: str) -> None:
    targets = PROMISED.get(part) or tuple(RENAMED.values())
    missing = [said for t in targets if t not in STILL_TO_COME and (said := problem(t))]
    assert not missing, "not there, and not in STILL_TO_COME:\n" + "\n".join(missing)


def test_what_is_still_to_come_is_not_there_yet() -> None:
    arrived = [target for target in STILL_TO_COME if problem(target) is None]
    assert not arrived, "there by now, take them out of STILL_TO_COME:\n" + "\n".join(arrived)


def test_what_is_still_to_come_was_promised_and_says_which_part_brings_it() -> None:
    assert set(STILL_TO_COME) <= set(ALL)
    assert all(STILL_TO_COME.values())


def test_no_target_is_listed_twice() -> None:
    listed = [target for targets in PROMISED.values() for target in targets]
    assert len(listed) == len(set(listed))


def test_a_target_that_is_not_there_is_noticed() -> None:
    for target in (
        "examples/no_such_example.py",
        "ludic.no_such_module",
        "ludic.types:NoSuchType",
        "ludic.types:Rollout.no_such_field",
        "ludic.seeding:derive_seed(no_such_argument)",
    ):
        assert re.match(re.escape(target), problem(target) or "")
