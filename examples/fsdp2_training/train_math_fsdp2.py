"""MATH with FSDP2: one GPU samples with vLLM, three train a sharded 7B model.

    CUDA_VISIBLE_DEVICES=0 ludic serve --model Qwen/Qwen2.5-7B-Instruct --port 8000
    CUDA_VISIBLE_DEVICES=1,2,3 torchrun --nproc-per-node 3 \\
        examples/fsdp2_training/train_math_fsdp2.py --model Qwen/Qwen2.5-7B-Instruct --port 8000

Every rank reads only its own rows of the weights. Rank 0 samples, sends the batch to all, and after
each update broadcasts the gathered weights to the server: with NCCL between GPUs, with gloo
between CPUs. Run it again to resume from the last checkpoint.
"""

import argparse
import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ludic.distributed import (
    BroadcastPolicyPublisher,
    Rank0OnlyPublisher,
    World,
    init_mesh,
    meta_parameters,
)
from ludic.inference import HFChatTemplate, InferenceSpec, SamplingConfig, VLLMChatClient
from ludic.interaction import Runtime
from ludic.rollouts import EnvSpec, ProtocolSpec, RolloutEngine, RolloutRequest
from ludic.training import CheckpointConfig, RolloutBatchSource, Trainer, TrainerConfig, make_grpo
from ludic.training.metrics.loggers import ConsoleLogger


def problem(data: Path | None) -> RolloutRequest:
    """One problem of MATH, from the hub or from a JSONL file with `problem` and `answer`."""
    source = {"path": str(data)} if data else {"split": "train"}
    parser = {"kind": "boxed", "success_reward": 0.1, "error_reward": 0.0}
    return RolloutRequest(
        env=EnvSpec("math", source), protocol=ProtocolSpec("single_agent", {"parser": parser})
    )


def folder_of(model: str) -> str:
    """Where the files of a model are; one that is only a name on the hub is downloaded."""
    return model if Path(model).is_dir() else snapshot_download(model)


async def train(args: argparse.Namespace) -> None:
    mesh = init_mesh(timeout_s=args.rank_timeout_s)
    on_gpu = mesh.device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    world = World.of(mesh, device)
    folder = folder_of(args.model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with meta_parameters():  # no memory yet: each rank gets only its own rows, from the folder
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.bfloat16 if on_gpu else torch.float32
        )
    algorithm = make_grpo(group_size=args.group_size)

    async with AsyncExitStack() as stack:
        source = publisher = None
        if world.leads:
            name = args.served_name or args.model
            client = VLLMChatClient([f"http://{args.host}:{args.port}"], model=name)
            await stack.enter_async_context(client)
            await client.connect(tokenizer=tokenizer)
            publisher = BroadcastPolicyPublisher(client, timeout_s=args.publish_timeout_s)
            sampling = SamplingConfig(temperature=1.0, max_tokens=args.max_tokens)
            runtime = Runtime(client, HFChatTemplate(tokenizer), name, InferenceSpec(sampling))
            source = RolloutBatchSource(
                engine=RolloutEngine(runtime=runtime, seed=args.seed),
                request_fn=lambda: (
                    [problem(args.data)] * (args.rollouts_per_update // args.group_size)
                ),
                algorithm=algorithm,
                max_steps=1,
                concurrency=256,
                rollouts_per_update=args.rollouts_per_update,
            )
        trainer = Trainer(
            model=model,
            algo=algorithm,
            batch_source=source,
            publisher=Rank0OnlyPublisher(publisher, world),
            cfg=TrainerConfig(
                learning_rate=args.lr,
                max_seq_len=args.max_seq_len,
                gradient_checkpointing=on_gpu,
                run_dir=args.output,
                publish_timeout_s=args.publish_timeout_s,
                checkpoint=CheckpointConfig(args.output / "checkpoints", every=args.save_every),
            ),
            mesh=mesh,
            init_from=folder,
            tokenizer=tokenizer,
            loggers=[ConsoleLogger(["train/reward_mean", "train/loss"])] if world.leads else (),
        )
        await trainer.train(args.steps)
        trainer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO on MATH, sharded with FSDP2.")
    parser.add_argument("--model", default="Qwen/Qwen2.5-7B-Instruct")
    parser.add_argument("--served-name", help="what the server calls it; default: as --model")
    parser.add_argument("--host", default="127.0.0.1", help="of the vLLM server")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--data", type=Path, help="a JSONL file; default: MATH from the hub")
    parser.add_argument("--output", type=Path, default=Path("runs/math_fsdp2"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rollouts-per-update", type=int, default=256)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--max-seq-len", type=int, default=2048)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--publish-timeout-s", type=float, default=600.0)
    parser.add_argument("--rank-timeout-s", type=float, default=7200.0)
    parser.add_argument("--seed", type=int, default=0)
    asyncio.run(train(parser.parse_args()))


if __name__ == "__main__":
    main()
