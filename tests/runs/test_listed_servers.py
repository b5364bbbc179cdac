"""Servers that a run file lists: they may hold any weights, until the run has come to them."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch

from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.runs.settings import parse_run
from ludic.runs.vllm_backend import open_vllm
from tests.examples.test_with_a_server import PlayingServer

SIZES = {"hidden_size": 32, "heads": 2, "kv_heads": 1, "layers": 1}


async def test_a_listed_server_has_the_models_weights_before_it_is_asked(tmp_path: Path) -> None:
    tiny_model(**SIZES, seed=1).save_pretrained(tmp_path)
    ours = tiny_model(**SIZES, seed=2)
    async with PlayingServer(folder=tmp_path).serving() as server, AsyncExitStack() as stack:
        theirs = dict(server.model.named_parameters())
        embedding = "model.embed_tokens.weight"
        assert not torch.equal(theirs[embedding], ours.get_input_embeddings().weight)
        config = parse_run(
            f"""
            [env]
            kind = "tic_tac_toe"
            [model]
            name = "{tmp_path}"
            [inference]
            backend = "vllm"
            servers = ["{server.url}"]
            """
        )
        await open_vllm(config, ours, tiny_tokenizer(), stack, None)
        for name, parameter in ours.named_parameters():
            assert torch.equal(theirs[name], parameter), name
    assert not server.asked


@pytest.mark.parametrize("route", ["/finish_weight_update", "/collective_rpc"])
async def test_a_listed_server_without_the_routes_is_named(tmp_path: Path, route: str) -> None:
    from ludic.errors import LudicError
    from tests.inference.vllm.fake_server import ROUTES

    tiny_model(**SIZES).save_pretrained(tmp_path)
    routes = tuple(r for r in (*ROUTES, "/tokenize") if r != route)
    fake = PlayingServer(folder=tmp_path, routes=routes)
    async with fake.serving() as server, AsyncExitStack() as stack:
        config = parse_run(
            f'[env]\nkind = "tic_tac_toe"\n[model]\nname = "{tmp_path}"\n'
            f'[inference]\nbackend = "vllm"\nservers = ["{server.url}"]\n'
        )
        with pytest.raises(LudicError, match=server.url):
            await open_vllm(config, tiny_model(**SIZES), tiny_tokenizer(), stack, None)


async def test_the_longest_conversation_of_a_run_holds_with_a_listed_server(tmp_path: Path) -> None:
    tiny_model(**SIZES).save_pretrained(tmp_path)
    async with PlayingServer(folder=tmp_path).serving() as server, AsyncExitStack() as stack:
        config = parse_run(
            f'[env]\nkind = "tic_tac_toe"\n[model]\nname = "{tmp_path}"\n'
            f'[inference]\nbackend = "vllm"\nservers = ["{server.url}"]\nmax_context_tokens = 40\n'
        )
        client, _ = await open_vllm(config, tiny_model(**SIZES), tiny_tokenizer(), stack, None)
        assert client.max_context_tokens == 40  # and not the server's
