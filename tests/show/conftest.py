"""What the tests of the page share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import ARGUMENTS, CHROMIUM, WAIT, Tab
from made_up import write_reproduction, write_run

from loopscope.show.page import build_report


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Write a run folder of that name."""
    return lambda name="run", *args, **kwargs: write_run(tmp_path / name, *args, **kwargs)


@pytest.fixture(scope="session")
def reproduction(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The 2×2 with two seeds and the penalty with one."""
    core = dict.fromkeys(("terminal+rmsnorm", "terminal+raw", "per-loop+rmsnorm", "per-loop+raw"), 2)
    return write_reproduction(tmp_path_factory.mktemp("samples") / "grid", {**core, "per-loop+penalty": 1})


@pytest.fixture(scope="session")
def reproduction_page(reproduction: Path) -> str:
    """The page about it."""
    return build_report([reproduction]).html


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """The system's chromium, started once; nothing is downloaded."""
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, timeout=WAIT)
        yield chromium
        chromium.close()


@pytest.fixture
def open_tab(browser) -> Iterator[Callable[..., Tab]]:
    tabs = []

    def opened(file: Path, **options: Any) -> Tab:
        tabs.append(Tab(browser, file, **options))
        return tabs[-1]

    yield opened
    for tab in tabs:
        tab.context.close()
