"""How new weights reach those who sample, and how long the trainer waits for it.

    python -m benchmarks.publish --mbit 1000
    python -m benchmarks.publish --only vllm --device cuda --shape 0.5b --running 128

Four ways: `in_process` (an engine that shares the trainer's module), `shared_memory` (an actor of
another process on this host), `tcp` (an actor in a network namespace of its own, over a link of
`--mbit` megabits a second, by HTTP; it takes root), and `vllm` (a live CPU server, of
LUDIC_VLLM_PYTHON or `.venv-vllm`). Each with all weights, and where the way knows them with
differences: what changed in a step of `--learning-rate` in float32, rounded to bfloat16.

With `--device cuda` the model is on a GPU, and a vLLM server on the same one gets it over CUDA IPC:
idle, and over `--running` requests, of which none may be lost.

`trainer_wait_s` is how long `publish` holds the trainer, and its next step after a short pass
forward and back, which waits where the weights are still copied; `total_s` how long it takes until
the sampler has the new version, `pause_s` for how much of it sampling stands still, and `bytes`
what travels. Medians of `--times`, the first left out; of vLLM each reading as well, and the
seconds of each stage. What cannot run here is null, and said.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

from benchmarks.two_hosts import Hosts, NoNamespacesError
from benchmarks.vllm import LOGS, qwen2_half_billion, server_for
from ludic.distributed.background import BackgroundPublisher, in_background
from ludic.distributed.interfaces import PolicyPublisher
from ludic.distributed.local import LocalPolicyPublisher
from ludic.distributed.publisher import BroadcastPolicyPublisher
from ludic.distributed.weights_http import PolicyServer
from ludic.errors import LudicError
from ludic.inference.client import TokenCompletionRequest
from ludic.inference.local import LocalChatClient
from ludic.inference.sampling import SamplingConfig
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.inference.vllm.client import VLLMChatClient
from ludic.pipeline import LocalRedis, PipelineConfig, PipelinePublisher, PolicyFolder, TrainerLease
from ludic.pipeline.policies import StoredPolicy, load_policy
from ludic.pipeline.store import Store
from ludic.pipeline.weights_difference import DifferenceServer
from ludic.pipeline.weights_fetcher import PolicyFetcher
from ludic.plumbing.cuda_streams import wait_for
from ludic.runs.interruption import rare_collections
from ludic.sharding.weights import ModelWeights

ROOT = Path(__file__).resolve().parent.parent
WAIT_S = 300.0
Figures = dict[str, float]


@dataclass
class Policy:
    """A model that is trained: every element of its float32 masters moves by the learning rate."""

    model: Any
    tokenizer: Any
    learning_rate: float
    masters: dict[str, torch.Tensor] = field(default_factory=dict)
    version: int = 0

    def step(self) -> int:
        """Changes the weights; returns their version."""
        for name, weight in self.model.named_parameters():
            master = self.masters.setdefault(name, weight.detach().float().clone())
            master.add_(master.sign(), alpha=self.learning_rate)
            weight.data.copy_(master)
        self.version += 1
        return self.version

    def pass_through(self) -> None:
        """Forward and back over 64 tokens: what a trainer does between a publish and its next step,
        and less of it."""
        ids = torch.arange(64, device=next(self.model.parameters()).device)[None] + 3
        self.model(input_ids=ids, labels=ids).loss.backward()
        self.model.zero_grad()


def load(tiny: bool, folder: str | None = None) -> tuple[Any, Any]:
    """The model of `folder` in bfloat16, else SmolLM2, and its tokenizer."""
    from tools import smollm2

    if not tiny:
        try:
            found = folder or smollm2.path()
        except (LudicError, FileNotFoundError, RuntimeError) as exc:
            say(f"the tiny model instead of SmolLM2: {exc}")
        else:
            from transformers import AutoModelForCausalLM, AutoTokenizer

            model = AutoModelForCausalLM.from_pretrained(found, dtype=torch.bfloat16)
            return model.eval(), AutoTokenizer.from_pretrained(found)
    model = tiny_model(hidden_size=64, heads=2, kv_heads=1)
    return model.to(torch.bfloat16), tiny_tokenizer()


def say(text: str) -> None:
    """For people; the last line of the output is for machines."""
    print(text, file=sys.stderr, flush=True)


def medians(rows: list[Figures]) -> Figures:
    """Of each figure, without the first row: it warms up."""
    rest = rows[1:] or rows
    return {name: statistics.median(row[name] for row in rest) for name in rest[0]}


def timed(start: float, wait: float, end: float, pause: float, sent: float) -> Figures:
    return {"trainer_wait_s": wait, "pause_s": pause, "total_s": end - start, "bytes": sent}


async def trainer_publishes(
    policy: Policy, publisher: PolicyPublisher
) -> tuple[float, float, float]:
    """Publishes the next version as a run does, and goes on with a pass. Returns when that began,
    for how long it held the trainer, and when it was done."""
    version = policy.step()
    wait_for(policy.model.parameters())  # as an optimizer step ends
    start = time.time()
    await publisher.publish(ModelWeights(policy.model), version)
    wait = time.time() - start

    async def settled() -> float:
        await publisher.settle()
        return time.time()

    settling = asyncio.create_task(settled())
    await asyncio.to_thread(policy.pass_through)
    ready = time.time()
    async with publisher.updating():
        wait += time.time() - ready
    return start, wait, await settling


async def in_process(policy: Policy, times: int) -> Figures:
    """To an engine that shares the module."""
    rows = []
    settings: dict[str, Any] = {"max_slots": 4, "max_context_tokens": 256}
    async with LocalChatClient(policy.model, policy.tokenizer, **settings) as client:
        publisher = LocalPolicyPublisher(client)
        for _ in range(times):
            version = policy.step()
            start = time.time()
            async with publisher.updating():
                await publisher.publish(ModelWeights(policy.model), version)
            took = time.time() - start
            rows.append(timed(start, took, time.time(), took, 0))
    return medians(rows)


# Actors


@contextmanager
def actor(
    pipeline: PipelineConfig, arguments: list[str], place: Callable[[list[str]], list[str]]
) -> Iterator[IO[str]]:
    """A process that follows the run's policies; what it prints."""
    command = [sys.executable, "-m", "benchmarks.publish", "--follow", pipeline.url, pipeline.run]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        place([*command, *arguments]),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths.rstrip(os.pathsep)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process.stdout
    finally:
        process.terminate()
        process.communicate(timeout=60)


async def follow(url: str, run: str, address: str, model: Any, tokenizer: Any) -> None:
    """An actor's part: takes each policy into an engine, and says when it had it."""
    store = Store(PipelineConfig(url, run))
    fetcher = PolicyFetcher(store.config, address=address)
    last = 0
    async with LocalChatClient(model, tokenizer, max_slots=4, max_context_tokens=256) as client:
        print("ready", flush=True)
        while True:
            announced = store.run("beat", "benchmark", "{}")[0]
            policy = StoredPolicy.read(announced) if announced else None
            if policy is None or policy.serial == last:
                await asyncio.sleep(0.01)
                continue
            last = policy.serial
            if policy.url:
                policy = await asyncio.to_thread(fetcher.fetch, policy)
            weights = await asyncio.to_thread(load_policy, policy)
            if weights is None:
                continue
            began = time.time()
            await client.sync_weights(weights, version=policy.serial)
            end = time.time()
            print(json.dumps([policy.version, end, end - began]), flush=True)


async def to_actor(
    policy: Policy,
    times: int,
    inner: PipelinePublisher,
    output: IO[str],
    travelled: Callable[[], int],
) -> Figures:
    """Publishes to a process that follows. `travelled` counts all bytes so far."""
    if (await asyncio.to_thread(output.readline)).strip() != "ready":
        raise LudicError("the actor did not start; what it said is above")
    publisher, rows = in_background(inner, held=True), []
    for _ in range(times):
        before = travelled()
        start, wait, _ = await trainer_publishes(policy, publisher)
        line = await asyncio.wait_for(asyncio.to_thread(output.readline), WAIT_S)
        if not line:
            raise LudicError("the actor ended; what it said is above")
        taken, end, pause = json.loads(line)
        if taken != policy.version:
            raise LudicError(f"the actor took version {taken}, and {policy.version} was published")
        rows.append(timed(start, wait, end, pause, travelled() - before))
    return medians(rows)


async def to_actors(
    policy: Policy, args: argparse.Namespace, hosts: Hosts | None, differences: bool = False
) -> Figures:
    """To an actor on this host, or on another."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=memory)))
        redis = stack.enter_context(LocalRedis(scratch / "redis"))
        pipeline = PipelineConfig(redis.url, "publish")
        lease = TrainerLease(pipeline)
        stack.callback(lease.close)
        if hosts is None:
            server = None
            arguments, hidden = ["127.0.0.1"], []
        else:
            kind = DifferenceServer if differences else PolicyServer
            server = kind("key", hosts.address)
            stack.callback(server.close)
            arguments, hidden = [hosts.addresses[0]], [str(folder), *([memory] if memory else [])]

        def place(command: list[str]) -> list[str]:
            return command if hosts is None else hosts.command(0, command, hidden=hidden)

        def travelled() -> int:
            if hosts is not None:
                return hosts.received(0)
            sizes = [file.stat().st_size for file in folder.glob("policy-*")]
            return policy.version * max(sizes, default=0)

        arguments += ["--device", args.device]
        arguments += ["--tiny"] if args.tiny else ["--shape", args.shape] if args.shape else []
        output = stack.enter_context(actor(pipeline, arguments, place))
        publisher = PipelinePublisher(lease, None, PolicyFolder(folder), server)
        return await to_actor(policy, args.times, publisher, output, travelled)


# vLLM


async def to_vllm(policy: Policy, times: int, url: str, kind: str, running: int) -> Any:
    """Verified publishes to a live server: `full` or `difference` to an idle one, or `running`."""
    rows: list[Any] = []
    async with VLLMChatClient(url, model="policy") as client, asyncio.TaskGroup() as group:
        on_gpu = next(policy.model.parameters()).is_cuda
        inner = BroadcastPolicyPublisher(
            client,
            timeout_s=WAIT_S,
            differences=kind == "difference",
            plane="ipc" if on_gpu else "auto",
        )
        publisher = BackgroundPublisher(inner, timeout_s=WAIT_S, held=True)
        config, lost = policy.model.config, 0
        long = min(1024, config.max_position_embeddings - 64)
        for number in range(times):
            asked = list[asyncio.Task[int]]()
            if kind == "running" and number:  # not beside the first, which warms up
                asked = [
                    group.create_task(long_request(client, n, long, config.vocab_size))
                    for n in range(running)
                ]
                await asyncio.sleep(1.0)
            start, wait, end = await trainer_publishes(policy, publisher)
            if any(task.done() for task in asked):
                raise LudicError("requests ended before the publish did: ask for longer ones")
            lost += sum(tokens != long for tokens in await asyncio.gather(*asked))
            report = publisher.last
            assert report is not None
            pause = report.details["stall_s"]
            rows.append(timed(start, wait, end, pause, report.bytes))
            say(f"{kind}, {report.details['plane']}: {json.dumps(rows[-1])}")
            stages = {name: round(took, 4) for name, took in report.details["stages"].items()}
            say(f"  {json.dumps(stages)}")
    figures: dict[str, Any] = {**medians(rows), "readings": rows[1:], "stages": stages}
    if kind == "running":
        figures["lost"] = lost
    return figures


async def long_request(client: VLLMChatClient, number: int, tokens: int, vocabulary: int) -> int:
    """A request that is under way for seconds; returns how many tokens came."""
    ids = tuple(3 + (number * 31 + place * 7) % (vocabulary - 3) for place in range(64))
    sampling = SamplingConfig(max_tokens=tokens, seed=number)
    request = TokenCompletionRequest(
        "policy", ids, sampling, timeout_s=WAIT_S, extensions={"ignore_eos": True}
    )
    trace = (await client.complete_tokens(request)).trace
    return 0 if trace is None else len(trace.completion_token_ids)


def vllm(policy: Policy, args: argparse.Namespace) -> dict[str, Any]:
    cuda = args.device == "cuda"
    own = sys.executable if cuda else str(ROOT / ".venv-vllm/bin/python")
    python = os.environ.get("LUDIC_VLLM_PYTHON") or own
    kinds = ["full"] if cuda else ["full", "difference"]
    kinds = args.kinds or [*kinds, *(["running"] if args.running else [])]
    figures: dict[str, Any] = dict.fromkeys(kinds)
    with tempfile.TemporaryDirectory() as folder:
        policy.model.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
        settings: dict[str, Any] = {
            "dtype": "bfloat16" if cuda else None,
            "max_model_len": min(2048, policy.model.config.max_position_embeddings),
            "max_num_seqs": max(8, 2 * args.running),
            "env": {"HF_HUB_OFFLINE": "1"},
        }
        try:
            start = time.time()
            with server_for(folder, cuda, python, **settings) as server:
                say(f"vLLM {server.build.version} was there after {time.time() - start:.0f} s")
                for kind in figures:
                    figures[kind] = asyncio.run(
                        to_vllm(policy, args.times, server.url, kind, args.running)
                    )
        except (LudicError, ExceptionGroup) as exc:
            say(f"no figures for vLLM: {exc!r}; its log is in {LOGS}")
    return figures


def tcp(policy: Policy, args: argparse.Namespace) -> dict[str, Figures]:
    try:
        with Hosts(1, args.mbit) as hosts:
            full = asyncio.run(to_actors(policy, args, hosts))
            difference = asyncio.run(to_actors(policy, args, hosts, differences=True))
            return {"full": full, "difference": difference}
    except NoNamespacesError as exc:
        say(f"no figures for TCP: {exc}")
    return {}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Time the way of new weights to the sampler.")
    parser.add_argument("--times", type=int, default=4, help="publishes, the first left out")
    parser.add_argument("--mbit", type=float, default=1000.0, help="the speed of the link for TCP")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--tiny", action="store_true", help="the tiny model, not SmolLM2")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", choices=["0.5b"], help="random weights, not SmolLM2")
    parser.add_argument("--running", type=int, default=0, help="also over so many requests to vLLM")
    parser.add_argument(
        "--kinds", nargs="+", choices=["full", "difference", "running"], help="of those to vLLM"
    )
    parser.add_argument("--only", choices=["in_process", "shared_memory", "tcp", "vllm"])
    parser.add_argument("--follow", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    model, tokenizer = qwen2_half_billion(args.device) if args.shape else load(args.tiny)
    model.to(args.device)
    if args.follow:
        url, run, address = args.follow
        asyncio.run(follow(url, run, address, model, tokenizer))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no namespace is left
    policy = Policy(model, tokenizer, args.learning_rate)
    size = sum(t.numel() * t.element_size() for _, t in ModelWeights(policy.model))
    figures: dict[str, Any] = {"weights_bytes": size, "link_mbit": args.mbit}
    ways: dict[str, Callable[[], Any]] = {
        "in_process": lambda: {"full": asyncio.run(in_process(policy, args.times))},
        "shared_memory": lambda: {"full": asyncio.run(to_actors(policy, args, None))},
        "tcp": lambda: tcp(policy, args),
        "vllm": lambda: vllm(policy, args),
    }
    with rare_collections():  # as a run has them
        for name, measure in ways.items():
            if args.only in (None, name):
                figures[name] = {"full": None, "difference": None, **measure()}
                say(f"{name}: {json.dumps(figures[name])}")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
