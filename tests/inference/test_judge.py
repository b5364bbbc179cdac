"""The judge behind a server: its connections."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from ludic.errors import ConfigError
from ludic.inference.judge import server_judge
from ludic.rewards import Attempt


async def _grades(judges: int) -> list[float]:
    """What new judges say, one after the other, of a server that always gives 5 of 10."""

    async def answer(request: web.Request) -> web.Response:
        message = {"role": "assistant", "content": "<score>5</score>"}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return web.json_response({"id": "1", "model": "m", "choices": [choice]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        grades = []
        for _ in range(judges):
            judge = server_judge(server=f"http://{host}:{port}/v1", model="m", rubric="Be right.")
            grade: Any = judge(Attempt("4", "4", "2+2?"))
            grades.append(await grade)
        return grades
    finally:
        await runner.cleanup()


def test_judges_share_their_connections_and_these_end_with_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sessions: list[aiohttp.ClientSession] = []
    make = aiohttp.ClientSession

    def noted(*args: Any, **kwargs: Any) -> aiohttp.ClientSession:
        sessions.append(make(*args, **kwargs))
        return sessions[-1]

    monkeypatch.setattr("ludic.inference.http.aiohttp.ClientSession", noted)
    for run in (1, 2):
        assert asyncio.run(_grades(3)) == [0.5] * 3
        assert len(sessions) == 2 * run  # one that keeps connections, and one that does not
        assert all(session.closed for session in sessions)


def test_an_address_that_is_none_is_refused_before_the_first_episode() -> None:
    with pytest.raises(ConfigError, match="base_url"):
        server_judge(server="not an address", model="m", rubric="Be right.")
