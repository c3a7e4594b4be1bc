"""Pieces of an HTML page that needs no other file: what is printed elsewhere as tables, and pictures.

All text is escaped here, and only here: what goes in is plain text, what comes out is HTML.
"""

from __future__ import annotations

import base64
import io
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.table import Table

SHOWN = 640  # longest side of a picture on a page, in pixels
QUALITY = 88  # of its JPEG

# Nothing is fetched, and no script runs, whatever the text in it says.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --paper: #fff; --faint: #6e7781; --line: #d0d7de }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #0d1117; --faint: #9198a1; --line: #3d444d }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1200px; margin: 2em auto; padding: 0 1.5em }
h1, h2, h3 { line-height: 1.25 }
h2 { margin-top: 2.2em; border-bottom: 1px solid var(--line); padding-bottom: .25em }
nav a { margin-right: 1.2em }
a { color: inherit }
figure { margin: 1.4em 0 }
figure svg { max-width: 100%; height: auto; display: block }
.scroll { overflow-x: auto; margin: 1.2em 0 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
table caption { text-align: left; font-weight: 600; padding-bottom: .4em }
th, td { padding: .2em .75em; border-bottom: 1px solid var(--line); vertical-align: top }
.note { color: var(--faint); font-size: .9em; white-space: pre-line; overflow-wrap: anywhere }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(240px, 1fr)); gap: .8em; margin: 1.4em 0 }
.panels figure { margin: 0 }
.panels img { width: 100%; height: auto; display: block }
figcaption { font-size: .9em; margin-top: .3em }
""".strip()


def page(title: str, body: str) -> str:
    """A whole page around a body that is HTML."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{_STYLE}
</style>
</head>
<body>
<h1>{escape(title)}</h1>
{body}
</body>
</html>
"""


def html_of(renderable: Any) -> str:
    """What rich prints, as HTML: tables, texts, groups of them, and what has a `__rich__` that returns these."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if isinstance(renderable, Group):
        return "\n".join(map(html_of, renderable.renderables))
    if isinstance(renderable, Table):
        return _table(renderable)
    if isinstance(renderable, (str, Text)):
        if isinstance(renderable, Text) and renderable.style == "table.title":
            return f"<p><strong>{_text(renderable)}</strong></p>"
        return f'<p class="note" style="white-space: pre-line">{_text(renderable)}</p>'
    return html_of(renderable.__rich__())


def _table(table: Table) -> str:
    title = "" if table.title is None else f"<caption>{_text(table.title)}</caption>"
    sides = [f'style="text-align: {"right" if column.justify == "right" else "left"}"' for column in table.columns]
    headings = (
        f'<th scope="col" {side}>{_text(column.header)}</th>' for column, side in zip(table.columns, sides, strict=True)
    )
    rows = (
        "".join(f"<td {side}>{_text(cell)}</td>" for cell, side in zip(cells, sides, strict=True))
        for cells in zip(*(column.cells for column in table.columns), strict=True)
    )
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    whole = f'<div class="scroll"><table>{title}\n<thead><tr>{"".join(headings)}</tr></thead>\n'
    whole += f"<tbody>\n{body}\n</tbody></table></div>"
    return whole if table.caption is None else f"{whole}\n{html_of(table.caption)}"


def _text(text: Any) -> str:
    """A cell or a title, which is a string or a rich Text."""
    return escape(str(text)).replace("\n", "<br>")


def image(pixels: NDArray[np.uint8], caption: str) -> str:
    """A picture [H, W, 3] that the page carries in itself, and its caption."""
    from PIL import Image

    shown = Image.fromarray(pixels)
    shown.thumbnail((SHOWN, SHOWN))
    data = io.BytesIO()
    shown.save(data, format="JPEG", quality=QUALITY)
    source = base64.b64encode(data.getvalue()).decode("ascii")
    size = f'width="{shown.width}" height="{shown.height}"'
    shown_as = f'<img src="data:image/jpeg;base64,{source}" {size} alt="{escape(caption)}">'
    return f"<figure>{shown_as}<figcaption>{escape(caption)}</figcaption></figure>"


def drawing(svg: str, description: str) -> str:
    """An `<svg>` element as a picture of the page."""
    return f'<figure role="img" aria-label="{escape(description)}">{svg}</figure>'
