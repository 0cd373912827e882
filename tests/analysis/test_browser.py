"""The page in a real browser: it draws, fits, and reports no error."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from kvq.analysis.measure import Settings
from kvq.analysis.report import run_report
from kvq.analysis.samples import synthetic_activations

pytestmark = pytest.mark.browser

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
WIDTH, HEIGHT = 1280, 2400
#: Put at the end of a copy of the page: what the browser made of it.
PROBE = """
<script>
window.addEventListener("load", () => {
  const images = [...document.images].map(i => [i.complete, i.naturalWidth, i.naturalHeight,
    i.getBoundingClientRect().width]);
  const tables = [...document.querySelectorAll(".scroll")]
    .map(t => [t.scrollWidth, t.clientWidth]);
  const result = {images, tables, errors: window.faults,
    width: document.documentElement.scrollWidth, view: window.innerWidth,
    height: document.documentElement.scrollHeight,
    requests: performance.getEntriesByType("resource").map(r => r.name)
      .filter(n => !n.startsWith("data:"))};
  document.title = "RESULT" + JSON.stringify(result) + "END";
});
</script>
"""
FAULTS = """<script>window.faults = [];
window.addEventListener("error", e => window.faults.push(String(e.message)), true);</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    run_report(
        synthetic_activations(layers=2, tokens=64, queries=16, head_dim=32),
        folder,
        modes=["int8", "int4", "int2", "lloyd4"],
        settings=Settings(theory_rows=64, gaussian_tokens=64, gaussian_heads=2, query_block=4),
        input_name="synthetic",
    )
    return folder / "report.html"


def chromium(profile: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    if CHROMIUM is None:
        pytest.skip("no Chromium")
    return subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--hide-scrollbars",
            "--enable-logging=stderr",
            f"--user-data-dir={profile}",
            f"--window-size={WIDTH},{HEIGHT}",
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


def test_the_page_loads_whole_and_fits(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    copy = tmp_path / "probed.html"
    copy.write_text(
        text.replace("<head>", f"<head>{FAULTS}").replace("</body>", f"{PROBE}</body>"),
        encoding="utf-8",
    )
    run = chromium(tmp_path / "profile", "--dump-dom", copy.as_uri())
    assert "CONSOLE" not in run.stderr
    result = json.loads(
        run.stdout.partition("RESULT")[2].partition("END")[0].replace("&amp;", "&")
    )
    assert result["errors"] == []
    assert result["requests"] == []
    assert result["width"] <= result["view"]
    assert len(result["images"]) == 9
    for complete, width, height, drawn in result["images"]:
        assert complete
        assert min(width, height) > 100
        assert 600 < drawn <= WIDTH
    assert len(result["tables"]) == 4
    for needed, there in result["tables"]:
        assert needed <= there, "a table is cut off"


def test_the_screenshot_is_not_blank(page: Path, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    run = chromium(tmp_path / "profile", f"--screenshot={picture}", page.as_uri())
    assert "CONSOLE" not in run.stderr
    pixels = imread(picture)[..., :3]
    assert pixels.shape[:2] == (HEIGHT, WIDTH)
    # A dark head, then ink on white all the way down.
    assert pixels[:40].mean() < 0.4
    for band in np.array_split(pixels[300:], 6):
        assert 0.6 < band.mean() < 0.999
        assert band.min() < 0.3
