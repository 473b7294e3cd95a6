"""A page in a real browser: what it complains of, what it asks for, and whether its labels can be read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Without /dev/shm: it is 64 MB in many containers, and a page that fills it stops without a word.
QUIET = ["--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
ARGUMENTS = ["--headless", "--no-sandbox", *QUIET]
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium")
WAIT = 60_000
"""Milliseconds before a page that does not get there has failed; a busy machine takes its time. Scripts in the page
have no limit in playwright, so the one that waits counts for itself; all else ends with the time limit of a test."""


class Tab:
    """A page that was opened from a file, everything it complained of, and everything it asked for."""

    def __init__(self, browser: Any, file: Path, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        self.context.set_default_timeout(WAIT)
        self.context.set_default_navigation_timeout(WAIT)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.complaints.append("dialog " + dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())

    def charts(self) -> list[str]:
        """The names of the charts."""
        return self.page.eval_on_selector_all("[data-chart]", "all => all.map(chart => chart.dataset.chart)")

    def lines(self, chart: str) -> int:
        """Series that are seen in a chart."""
        seen = "all => all.filter(each => getComputedStyle(each).display !== 'none').length"
        return self.page.eval_on_selector_all(f'[data-chart="{chart}"] [data-group]', seen)
