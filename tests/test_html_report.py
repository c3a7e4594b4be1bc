"""The report is one page that opens in a browser without a network, and a file for each picture."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from samopt.bench_table import to_dict
from samopt.errors import InvalidInput
from samopt.html_report import of_benchmark, of_file, of_masks, write
from samopt.picture import MaskComparison
from tests.made_up_results import COMPARISON, ROWS, SETTING
from tests.test_html_page import Reader
from tests.test_report import REPORT

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


def masks(name: str) -> MaskComparison:
    random = np.random.default_rng(0)
    image, before, after, difference = random.integers(0, 256, (4, 60, 90, 3), dtype=np.uint8)
    return MaskComparison(name, 3, image, before, after, difference, 0.0125, 1)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("report")
    bench, profile = folder / "rows.json", folder / "profile.json"
    bench.write_text(json.dumps(to_dict(SETTING, ROWS)))
    profile.write_text(json.dumps(COMPARISON.to_dict()))
    shown = of_masks(REPORT, [masks("a <1>.png"), masks("b.png")])
    return write(folder, [of_file(bench), of_file(profile), shown, of_file(profile)])


def test_every_picture_is_a_file_of_its_own(written: list[Path]) -> None:
    charts = ["throughput", "memory", "accuracy"]
    names = [f"vit_q-waterfall-{chart}.{kind}" for chart in charts for kind in ("svg", "png")]
    profile, again = ([f"profile{number}-kernels.{kind}" for kind in ("svg", "png")] for number in ("", "-2"))
    assert [path.name for path in written] == [
        *("report.html", *names, *profile, "masks-1.png", "masks-2.png"),
        *again,
    ]
    for path in written:
        if path.suffix == ".png":
            with Image.open(path) as image:
                image.verify()


def test_the_page_says_what_the_tables_say(written: list[Path]) -> None:
    read = Reader(written[0].read_text(encoding="utf-8"))
    for text in (
        "vit_q, waterfall of quick",
        "48.0 (2.40x)",  # of the chart, which is text
        "+ sdpa & <b>",
        "sparse24 dropped",
        "samopt bench waterfall --recipe 'a<b>.toml'",
        "x[m < 1 & y]",  # of the audit
        "Int8Dynamic() skipped",
        "Bad dropped: it cost [/too] much",
        "a <1>.png, 3 points",
        "differ: 1.250% of the pixels (drawn larger)",
    ):
        assert text in read.text
    assert len([tag for tag in read.tags if tag == "svg"]) == 5
    assert len([tag for tag in read.tags if tag == "img"]) == 8
    ids = [value for name, value in read.attributes if name == "id" and str(value).startswith("part")]
    links = [value for name, value in read.attributes if name == "href" and str(value).startswith("#part")]
    assert links == [f"#{value}" for value in ids]


def test_where_there_is_no_memory_the_page_says_so() -> None:
    rows = [dataclasses.replace(row, peak_gib=0.0) for row in ROWS]
    section = of_benchmark(dataclasses.replace(SETTING, device="cpu"), rows)
    assert list(section.charts) == ["throughput", "accuracy"]
    assert "PyTorch measures its peak on a GPU, not on cpu" in section.body


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "no results of a benchmark"),
        ('{"before": 1, "after": 2}', "no profile of this version"),
        (json.dumps(to_dict(SETTING, [])), "results without a row"),
        ('{"model": "m", "rows": [{"what": "a", "batch_size": 1, "milliseconds": 2}]}', "of another version of samopt"),
    ],
)
def test_what_is_neither_benchmark_nor_profile_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(InvalidInput, match=message):
        of_file(tmp_path / "file.json")


def test_fields_of_later_versions_are_passed_over(tmp_path: Path) -> None:
    found = to_dict(SETTING, ROWS)
    found = {**found, "later": 1, "rows": [{**row, "later": 1} for row in found["rows"]]}
    (tmp_path / "rows.json").write_text(json.dumps(found))
    assert of_file(tmp_path / "rows.json").body == of_benchmark(SETTING, ROWS).body


@pytest.fixture
def browser() -> Iterator[Any]:
    """Chromium without a window, that logs what it is asked to fetch."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("needs chromium and chromedriver (Debian's packages chromium and chromium-driver)")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless", "--no-sandbox", "--disable-background-networking", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


SIZES = """
const shown = element => { const box = element.getBoundingClientRect(); return box.width * box.height; };
return {
  images: [...document.images].map(image => image.complete ? image.naturalWidth * shown(image) : 0),
  drawings: [...document.querySelectorAll("svg")].map(shown),
  wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
};
"""


def test_a_browser_shows_all_of_it_and_fetches_nothing(browser: Any, written: list[Path]) -> None:
    address = written[0].as_uri()
    browser.get(address)
    sizes = browser.execute_script(SIZES)
    assert len(sizes["images"]) == 8
    assert len(sizes["drawings"]) == 5
    assert min(sizes["images"] + sizes["drawings"]) > 1000
    assert sizes["wide"] <= 0, "nothing is cut off at the side"
    assert browser.get_log("browser") == [], "no error, and nothing that the page's policy refused"
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert asked[0] == address, "what is fetched is logged"
    assert [url for url in asked[1:] if not url.startswith("data:")] == []
