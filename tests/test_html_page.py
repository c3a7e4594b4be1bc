"""Tables and texts become HTML as they are, whatever characters they hold."""

from __future__ import annotations

import base64
import io
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image
from rich.console import Group
from rich.table import Table
from rich.text import Text

from samopt.html_page import html_of, image, page
from samopt.shown import Shown

NASTY = '<script>alert("1")</script> & [b]'


class Reader(HTMLParser):
    """Every tag in order, and all text together."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attributes

    def handle_data(self, data: str) -> None:
        self.text += data


class Nasty(Shown):
    def __rich__(self) -> Group:
        table = Table("what", title=Text(NASTY), caption=Text(f"below {NASTY}"))
        table.add_column(NASTY, justify="right")
        table.add_row(Text(NASTY), "two\nlines")
        return Group(Text(NASTY, style="table.title"), table, "words")


def test_all_text_is_there_and_none_is_markup() -> None:
    read = Reader(html_of(Nasty()))
    assert read.text.count(NASTY) == 5
    assert "script" not in read.tags
    assert [tag for tag in read.tags if tag in ("table", "caption", "th", "td", "br")] == [
        *("table", "caption", "th", "th"),
        *("td", "td", "br"),
    ]
    assert read.attributes.count(("style", "text-align: right")) == 2
    assert "words" in read.text


def test_a_page_fetches_nothing_and_runs_nothing() -> None:
    made = page(NASTY, "<p>body</p>")
    read = Reader(made)
    assert read.text.count(NASTY) == 2  # the title and the heading
    assert "script" not in read.tags
    assert "default-src 'none'" in made
    assert "http" not in made.replace('http-equiv="Content-Security-Policy"', "")


@pytest.mark.parametrize(("shape", "shown"), [((30, 60), (60, 30)), ((1280, 640), (320, 640))])
def test_a_picture_is_in_the_page(shape: tuple[int, int], shown: tuple[int, int]) -> None:
    pixels = np.full((*shape, 3), (200, 30, 60), dtype=np.uint8)
    read = Reader(image(pixels, NASTY))
    found = dict(read.attributes)
    assert found["alt"] == NASTY
    assert read.text == NASTY
    kind, _, data = str(found["src"]).partition(",")
    assert kind == "data:image/jpeg;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as decoded:
        assert decoded.size == shown
        assert np.abs(np.asarray(decoded).astype(int) - (200, 30, 60)).max() < 6
