"""A page in a real browser: what it complains of, what it asks for, and whether its labels can be read."""

from __future__ import annotations

import json
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


DRAW_ALL = """async wait => {
  const charts = [...document.querySelectorAll('[data-chart]')], end = Date.now() + wait;
  for (const chart of charts) {
    chart.scrollIntoView();
    while (!chart.dataset.drawn) {
      if (Date.now() > end) throw new Error(`${chart.dataset.chart} was not drawn within ${wait} ms`);
      await new Promise(done => setTimeout(done, 10));
    }
  }
  return charts.map(chart => chart.dataset.chart);
}"""


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

    def draw_all(self) -> list[str]:
        """Scroll to every chart, as a reader would, and give their names."""
        return self.page.evaluate(DRAW_ALL, WAIT)

    def lines(self, chart: str) -> int:
        """Lines and marks that are drawn in a chart."""
        return self.page.locator(f'[data-chart="{chart}"] .scatterlayer .trace').count()

    def hovered(self, chart: str) -> str:
        """What is shown over the first mark of a chart."""
        self.page.locator(f'[data-chart="{chart}"] .scatterlayer .trace .point').first.hover(force=True)
        label = self.page.locator(f'[data-chart="{chart}"] .hoverlayer .hovertext')
        label.wait_for()
        return label.text_content()

    def data(self) -> dict[str, Any]:
        return json.loads(self.page.locator("#page-data").text_content())["charts"]
