"""`ludic serve`: a server that stands alone, or one that registers with a run for as long as it
serves."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from ludic.distributed.addresses import listening_address, refusal_to_bind
from ludic.errors import ConfigError
from ludic.inference.vllm import server as vllm
from ludic.runs.locate import read_run
from ludic.runs.settings import RunConfig

Registering = Callable[[str], AbstractContextManager[object]]


def serve(arguments: Sequence[str]) -> int:
    """The command. What is not about registering goes to vLLM's server as it stands."""
    parser = argparse.ArgumentParser(prog="ludic serve", add_help=False, allow_abbrev=False)
    parser.add_argument("--register", metavar="RUN", help="sample for this run: its folder or file")
    parser.add_argument("--name", default="", help="its name in `ludic pipeline status`")
    parser.add_argument(
        *("--engine",),
        choices=("vllm", "local"),
        default="vllm",
        help="local: Ludic's own engine, serving the run's model",
    )
    parser.add_argument("--pass-on", metavar="ADDRESS", help=argparse.SUPPRESS)  # vLLM's says it
    options, rest = parser.parse_known_args(list(arguments))
    passing_on = [] if options.pass_on is None else ["--pass-on", options.pass_on]
    if {"-h", "--help"} & set(rest):
        parser.print_help()
        return vllm.main(rest)
    if options.pass_on is not None:
        _check_passing_on(options.pass_on)
    if options.register is None:
        if options.engine == "local":
            raise ConfigError("--engine local serves the model of a run: name it with --register")
        return vllm.main([*rest, *passing_on])

    from ludic.pipeline.servers import Registration  # which needs the extra `redis`
    from ludic.pipeline.store import Store
    from ludic.runs.pipeline.address import find_pipeline, key_of_servers, section_of

    config, _, opened = read_run(options.register)
    folder = opened.path if opened is not None else None
    if folder is None and section_of(config).name is None:
        raise ConfigError(
            f"--register {options.register} does not say which of its runs: name the run's folder, "
            "or give its Redis keys a name of their own with pipeline.name"
        )
    key_file, key = key_of_servers(config, folder)
    store = Store(find_pipeline(config, folder))

    def registering(url: str) -> Registration:
        model, slots = config.model.name, config.slots
        name = options.name
        return Registration(store, url, model=model, capacity=slots, key=key, name=name)

    where = argparse.ArgumentParser(prog="ludic serve --register", allow_abbrev=False)
    where.add_argument("--host", default="127.0.0.1")
    where.add_argument("--port", type=int, default=0)
    address, flags = where.parse_known_args(rest)
    if address.host in ("0.0.0.0", "::"):
        raise ConfigError(
            f"--host {address.host} cannot be reached by others: name this machine's address in "
            "the network that the run's machines share"
        )
    if key is None and not address.host.startswith("127."):
        raise ConfigError(
            f"--host {address.host} without a key would let anyone change the weights: register "
            "with the run's folder, which has one, or name a file in inference.api_key_file"
        )
    port = address.port or vllm.free_port(address.host)
    try:
        if options.engine == "local":
            if flags:
                raise ConfigError(f"--engine local takes its settings from the run, not {flags}")
            serving = _serve_engine(config, address.host, port, key, registering, options.pass_on)
            return asyncio.run(serving)
        bound = ["--host", address.host, "--port", str(port), *passing_on]
        bound += [] if key_file is None else ["--key-file", str(key_file)]
        return vllm.main([*flags_of(config, flags), *bound], registering)
    finally:
        store.close()


def _check_passing_on(setting: str) -> None:
    """Raises if this machine has no such address; `auto` follows from the trainer, and a port may
    be another server's for a while."""
    host, _ = listening_address(setting, "", "--pass-on")
    if why := refusal_to_bind(host):
        raise ConfigError(
            f"--pass-on {setting} cannot be listened on ({why}): name an address of this machine, "
            "or auto"
        )


def flags_of(config: RunConfig, flags: Sequence[str]) -> list[str]:
    """Returns the flags that a run's settings stand for, and after them those given, which win."""
    from ludic.runs.vllm_backend import server_settings

    name = config.model.name
    settings = server_settings(config, Path(name), name)
    values = {
        "--model": name,
        "--served-model-name": name,
        "--dtype": settings.dtype,
        "--max-model-len": settings.max_model_len,
        "--max-num-seqs": settings.max_num_seqs,
        "--max-lora-rank": settings.max_lora_rank,
        "--gpu-memory-utilization": settings.gpu_memory_utilization,
        "--kv-cache-gib": settings.kv_cache_gib,
        "--python": config.inference.vllm_python,
        "--start-timeout-s": config.inference.vllm.start_timeout_s,
    }
    of_run = [str(x) for pair in values.items() if pair[1] is not None for x in pair]
    of_run += ["--enforce-eager"] if settings.eager else []
    positional = ["--model"] if flags and not flags[0].startswith("-") else []
    return [*of_run, *settings.extra, *positional, *flags]


async def _serve_engine(
    config: RunConfig,
    host: str,
    port: int,
    key: str | None,
    registering: Registering,
    pass_on: str | None = None,
) -> int:
    """Serves the run's model with the in-process engine until a signal says to stop."""
    from aiohttp import web

    from ludic.distributed.engine_server import EngineServer
    from ludic.plumbing.precision import float32_products
    from ludic.runs.model import build_model, local_client, precision_of

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for sign in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(sign, stop.set)
    # What is published has the adapter merged into the weights.
    plain = config.model.model_copy(update={"lora": None})
    config = config.model_copy(update={"model": plain})
    model, tokenizer = await asyncio.to_thread(build_model, config)
    with float32_products(precision_of(config)):
        async with local_client(config, model, tokenizer, on_update="continue") as client:
            name = config.model.name
            server = EngineServer(client, model, tokenizer, name=name, key=key, pass_on=pass_on)
            runner = web.AppRunner(server.app, handler_cancellation=True, shutdown_timeout=1.0)
            await runner.setup()
            try:
                await web.TCPSite(runner, host, port).start()
                registration = registering(f"http://{host}:{port}")
                await asyncio.to_thread(registration.__enter__)  # it asks this very loop
                print(f"http://{host}:{port} serves {name}", flush=True)
                await stop.wait()
                await asyncio.to_thread(registration.__exit__, None, None, None)
            finally:
                await runner.cleanup()
    print("stopped", flush=True)
    return 0
