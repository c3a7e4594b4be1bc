"""Files are whole, the same every time, and take a page's colours."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import matplotlib
import pytest
from PIL import Image

from samopt.charts import save, throughput_waterfall, to_svg
from samopt.charts.style import INK, short
from tests.made_up_results import ROWS, SETTING


def test_an_svg_and_a_png_are_written_and_settings_stay(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    figure = throughput_waterfall(SETTING, ROWS)
    assert figure is not None
    svg, png = save(figure, tmp_path, "chart")
    assert dict(matplotlib.rcParams) == before
    assert (svg.name, png.name) == ("chart.svg", "chart.png")
    root = ElementTree.fromstring(svg.read_text(encoding="utf-8"))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    for text in ("+ sdpa & <b>", "60.0 (3.00x)", "images/s", "gained by the step"):
        assert text in texts
    with Image.open(png) as image:
        assert image.width > 1000
        assert image.getpixel((0, 0)) == (255, 255, 255, 255)


def test_an_element_for_a_page_is_the_same_every_time_and_fits_beside_others() -> None:
    figures = [throughput_waterfall(SETTING, ROWS) for _ in range(2)]
    first, second = (to_svg(figure) for figure in figures if figure is not None)
    assert first == second
    assert first.startswith("<svg")
    assert first.endswith("</svg>")
    assert INK not in first
    assert "currentColor" in first
    used = set(re.findall(r"#([\w-]+)", first))
    assert set(re.findall(r' id="([^"]*)"', first)) <= used, "no id that is not needed"
    assert "metadata" not in first


@pytest.mark.parametrize(("figure", "text"), [(1234.5, "1234"), (99.96, "100.0"), (12.34, "12.3"), (0.1234, "0.12")])
def test_figures_in_short(figure: float, text: str) -> None:
    assert short(figure) == text
