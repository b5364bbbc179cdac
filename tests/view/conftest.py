"""A server in this process, and one browser for all tests of the pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.view.serving import Served, serving


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Serves any folders, until the end of the test."""
    with ExitStack() as stack:
        yield lambda *roots: stack.enter_context(serving(*roots))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The system's chromium; where it is missing, tests are skipped, unless `make test-view` asked
    for them. Not for longer than a module: while it is open, its event loop counts as running, and
    tests of other modules have loops of their own."""
    names = ("chromium", "google-chrome", "chromium-browser")
    path = next(filter(None, map(shutil.which, names)), None)
    missing = None if path else "chromium is not installed: apt-get install chromium"
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing = "playwright is not installed: make setup"
    if missing and os.environ.get("LUDIC_BROWSER") == "required":
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield made
        made.close()


class Pages:
    """Makes pages that must not report an error."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser
        self.contexts: list[Any] = []
        self.errors: list[str] = []

    def __call__(self, address: str, **options: Any) -> Any:
        context = self.browser.new_context(
            **{"viewport": {"width": 1280, "height": 860}, "accept_downloads": True, **options}
        )
        context.set_default_timeout(30_000)
        self.contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on(
            "console",
            lambda message: self.errors.append(message.text) if message.type == "error" else None,
        )
        page.on("dialog", lambda dialog: self.errors.append(f"a dialog: {dialog.message}"))
        page.goto(address)
        return page


@pytest.fixture
def pages(browser: Any) -> Iterator[Pages]:
    """Opens pages; at the end no console may have an error."""
    made = Pages(browser)
    yield made
    for context in made.contexts:
        context.close()
    assert made.errors == []
