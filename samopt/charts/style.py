"""How all charts look, and how they are written.

Colours are those of Okabe and Ito, "Color Universal Design", which people with any colour vision tell apart; nothing is
told by colour alone. In an SVG, text and axes have the colour of the text around it: on a page, the page's; in a
file of its own, black on white, or the reverse where the viewer prefers dark colours.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, PURPLE, SKY, RED, GREY = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#8c8c8c",
)
INK = "#1f2328"  # of text and axes
DPI = 144

_FILE_COLOURS = (
    "svg{color:#1f2328;background:#fff}@media(prefers-color-scheme:dark){svg{color:#e6edf3;background:#0d1117}}"
)
_RC: Any = {
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "figure.facecolor": "white",
    "font.family": ["DejaVu Sans"],
    "font.size": 10,
    "hatch.linewidth": 0.8,
    "svg.fonttype": "none",  # text stays text: it can be searched, read aloud, and scales
    "svg.hashsalt": "samopt",  # the same figures make the same file
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """Figures made inside look as samopt's do; matplotlib's settings are put back."""
    import matplotlib

    with matplotlib.rc_context(_RC):
        yield


def plain_axes(axes: Axes, label: str, upright: bool = False) -> None:
    """A faint grid along the axis that has the figures, its label, and no frame."""
    axis = axes.yaxis if upright else axes.xaxis
    axis.set_label_text(label)
    axis.grid(True, color=GREY, alpha=0.4, linewidth=0.6)
    axes.set_axisbelow(True)


def short(figure: float) -> str:
    """Three figures that count, without an exponent."""
    return f"{figure:.0f}" if figure >= 100 else f"{figure:.1f}" if figure >= 10 else f"{figure:.2f}"


def to_svg(figure: Figure) -> str:
    """A figure as an `<svg>` element for a page, in the page's text colour; a pure function of the figure."""
    text = io.StringIO()
    with styled():
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor").strip()
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Matplotlib numbers its groups from 1 in every figure; a page may hold several, and an id only once.
    used = set(re.findall(r"#([\w-]+)", svg))
    return re.sub(r' id="([\w.-]+)"', lambda found: found[0] if found[1] in used else "", svg)


def save(figure: Figure, folder: str | Path, name: str, element: str | None = None) -> list[Path]:
    """Writes NAME.svg and NAME.png into a folder that is there; returns both paths.

    Args:
        figure: what to write.
        folder: where.
        name: of the files.
        element: what `to_svg` made of the figure, where that is known.
    """
    svg, png = (Path(folder) / f"{name}.{kind}" for kind in ("svg", "png"))
    inline = to_svg(figure) if element is None else element
    first_tag = inline.index(">") + 1
    svg.write_text(f"{inline[:first_tag]}\n<style>{_FILE_COLOURS}</style>{inline[first_tag:]}\n", encoding="utf-8")
    with styled():
        figure.savefig(png, format="png", dpi=DPI, metadata={"Software": None})
    return [svg, png]
