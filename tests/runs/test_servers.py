"""Servers in a run file: vLLM's own settings, keys, and addresses without secrets."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import ludic
from ludic.errors import ConfigError, LudicError
from ludic.inference import OpenAIChatClient, VLLMChatClient
from ludic.inference.addresses import split_user, without_user
from ludic.inference.vllm.flags import ServerSettings, VLLMBuild, command_line
from ludic.runs.check import check_parts
from ludic.runs.episodes import inference_spec
from ludic.runs.settings import parse_run
from ludic.runs.storage import origin
from tests.inference.vllm.fake_server import FakeVLLM
from tests.runs.test_run import small
from tests.runs.worlds import Letters

RUN = '[env]\nkind = "tic_tac_toe"\n[inference]\n'
BUILD = VLLMBuild("python", "0.32.0", cpu=False, has_plugin=True)


def test_vllms_own_settings_reach_its_command() -> None:
    run = parse_run(
        RUN
        + 'backend = "vllm"\n[inference.vllm]\ngpu_memory = 0.4\neager = true\n'
        + "[inference.vllm.flags]\nmax_num_batched_tokens = 512\nenable-prefix-caching = false\n"
        + "enable-expert-parallel = true\nhf-overrides = { rope_theta = 10.0 }\n"
    )
    own = run.inference.vllm
    assert own.arguments() == (
        *("--max-num-batched-tokens", "512", "--no-enable-prefix-caching"),
        *("--enable-expert-parallel", "--hf-overrides", '{"rope_theta": 10.0}'),
    )
    settings = ServerSettings(
        model="m", gpu_memory_utilization=own.gpu_memory, eager=own.eager, extra=own.arguments()
    )
    command = command_line(settings, BUILD)
    assert command[command.index("--gpu-memory-utilization") + 1] == "0.4"
    assert "--enforce-eager" in command
    assert command[-2:] == ["--hf-overrides", '{"rope_theta": 10.0}']


def test_stop_token_ids_reach_the_sampling() -> None:
    run = parse_run(RUN + "[inference.sampling]\nstop_token_ids = [1, 2]\n")
    assert inference_spec(run).sampling.stop_token_ids == (1, 2)


VLLM = 'backend = "vllm"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (VLLM + "[inference.vllm]\ngpu_memroy = 0.4\n", "did you mean 'gpu_memory'"),
        (VLLM + "[inference.vllm]\ngpu_memory = 40\n", "gpu_memory.*less than or equal to 1"),
        (VLLM + "[inference.vllm.flags]\nmax_model_len = 8\n", "use inference.max_context_tokens"),
        (
            VLLM + "[inference.vllm.flags]\n--gpu-memory-utilization = 0.4\n",
            "use inference.vllm.gpu_memory",
        ),
        (VLLM + "[inference.vllm.flags]\nno-enforce-eager = true\n", "use inference.vllm.eager"),
        ("[inference.vllm]\ngpu_memory = 0.4\n", 'set backend = "vllm"'),
        (
            VLLM + 'servers = ["http://a"]\n[inference.vllm]\ngpu_memory = 0.4\n',
            "name no servers",
        ),
        ("[inference.sampling]\nstop_token_ids = [-1]\n", "stop_token_ids.0.*equal to 0"),
        ("[inference.sampling]\nstop_tokens = [1]\n", "did you mean 'stop_token_ids'"),
        (VLLM + 'servers = ["localhost:8000"]\n', "try http://localhost:8000"),
        ('api_key_env = "KEY"\n', "name them in `servers`"),
        (VLLM + 'servers = ["http://a"]\napi_key = "s"\n', "did you mean 'api_key_"),
        (
            VLLM + 'servers = ["http://a"]\napi_key_env = "LUDIC_TEST_KEX"\n',
            "not set; did you mean 'LUDIC_TEST_KEY'",
        ),
        (
            VLLM + 'servers = ["http://a"]\napi_key_env = "A"\napi_key_file = "b"\n',
            "api_key_env or api_key_file, not both",
        ),
    ],
)
def test_a_bad_value_gets_a_sentence_with_the_nearest_right_one(
    text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LUDIC_TEST_KEY", "secret")
    with pytest.raises(LudicError, match=said) as failed:
        check_parts(parse_run(RUN + text))
    assert "secret" not in str(failed.value)


def test_a_key_in_the_place_of_its_variable_is_not_repeated() -> None:
    text = VLLM + 'servers = ["http://a"]\napi_key_env = "sk-123-secret"\n'
    with pytest.raises(ConfigError, match="is the name of an environment variable") as failed:
        check_parts(parse_run(RUN + text))
    assert "secret" not in str(failed.value)


@pytest.mark.parametrize(
    "text",
    [
        VLLM + 'servers = ["http://ada:secret@gpu:8000"]\n',
        '[reference]\nserver = "http://ada:secret@gpu:8000"\n',
        '[[player]]\nname = "x"\nserver = "http://ada:secret@gpu:8000"\n',
        '[env.kwargs]\nrewards = { kind = "judge", server = "http://secret@gpu" }\n',
    ],
)
def test_a_run_file_holds_no_password(text: str) -> None:
    with pytest.raises(ConfigError, match=r"user or a password.*api_key_env") as failed:
        parse_run(RUN + text if text.startswith("backend") else RUN.replace("[inference]", text))
    assert "secret" not in str(failed.value)


def test_addresses_lose_user_and_password() -> None:
    assert without_user("http://a:b@c:1/v1, https://d@e") == "http://c:1/v1, https://e"
    assert without_user("https://host/?mail=a@b") == "https://host/?mail=a@b"
    assert without_user("https://host?mail=a@b") == "https://host?mail=a@b"
    assert split_user("http://ada:se%40cret@gpu:8000") == (
        "http://gpu:8000",
        {"Authorization": "Basic YWRhOnNlQGNyZXQ="},
    )


def test_what_was_typed_is_recorded_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ludic", "x", "a=http://ada:secret@gpu"])
    assert origin()["command"] == ["ludic", "x", "a=http://gpu"]


async def test_clients_use_a_password_and_never_show_it() -> None:
    vllm = VLLMChatClient("http://ada:secret@127.0.0.1:9", max_retries=0)
    plain = OpenAIChatClient("http://ada:secret@127.0.0.1:9/v1", max_retries=0)
    assert repr(vllm) == "VLLMChatClient(['http://127.0.0.1:9'])"
    assert "secret" not in repr(plain)
    with pytest.raises(LudicError) as failed:
        await vllm.connect()
    assert "secret" not in str(failed.value)
    with pytest.raises(LudicError) as failed:
        await plain.complete_messages([{"role": "user", "content": "hi"}], model="m")
    assert "secret" not in str(failed.value)
    await vllm.close()
    await plain.close()
    with pytest.raises(ConfigError, match="one user and password"):
        VLLMChatClient(["http://a:b@c", "http://d:e@f"])


@pytest.mark.integration
async def test_a_runs_servers_are_asked_with_the_key_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LUDIC_TEST_KEY", "secret")
    asked: list[str | None] = []
    async with FakeVLLM(
        faults={"/v1/models": lambda r: asked.append(r.headers["Authorization"])}
    ).serving() as fake:
        inference = {
            **small()["inference"],
            **{"backend": "vllm", "servers": [fake.url], "api_key_env": "LUDIC_TEST_KEY"},
        }
        run = ludic.Run(Letters, **small(inference=inference, out="run"))
        with pytest.raises(LudicError):  # the fake serves another model
            await run.go_async()
    assert set(asked) == {"Bearer secret"}
    assert "secret" not in json.dumps(run.config.plain())
