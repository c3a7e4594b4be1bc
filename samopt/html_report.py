"""The report as one page and a folder of pictures: benchmarks, profiles, and masks before and after.

from samopt.html_report import of_file, write
write("report", [of_file("vit_b.json"), of_file("profile/profile.json")])
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from samopt.bench_table import Row, Setting, check_results, from_dict, read_json, table
from samopt.html_page import drawing, html_of, image, page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from samopt.picture import MaskComparison
    from samopt.profiling import Comparison
    from samopt.report import Report


@dataclass(frozen=True)
class Section:
    """A part of the report.

    Attributes:
        title: its heading.
        name: what its files are called; a number is added where another section has it.
        charts: for files of their own, by name.
        body: tables and words below the charts, as HTML.
        masks: pictures side by side, below these.
    """

    title: str
    name: str
    charts: dict[str, Figure] = field(default_factory=dict)
    body: str = ""
    masks: Sequence[MaskComparison] = ()


def of_file(path: str | Path) -> Section:
    """The section of a file that `samopt bench ... --json` or `samopt profile` wrote.

    Raises:
        InvalidInput: it cannot be read, or is neither.
    """
    found = read_json(path)
    if isinstance(found, dict) and {"before", "after"} <= found.keys():
        from samopt.profiling.reading import comparison_from_dict

        return of_profile(comparison_from_dict(found, path))
    return of_benchmark(*from_dict(check_results(found, path), path))


def of_benchmark(setting: Setting, rows: Sequence[Row]) -> Section:
    """Waterfalls, accuracy against speed, and the table of a benchmark."""
    from samopt import charts

    kinds: dict[str, Callable[[Setting, Sequence[Row]], Figure | None]] = {
        "throughput": charts.throughput_waterfall,
        "memory": charts.memory_waterfall,
        "accuracy": charts.accuracy_against_speed,
    }
    drawn = {name: figure for name, draw in kinds.items() if (figure := draw(setting, rows)) is not None}
    what = f"waterfall of {setting.recipes[0]}" if setting.bench == "waterfall" else "image encoder"
    body = html_of(table(setting, rows))
    if "memory" not in drawn:
        body += "\n" + html_of(f"No chart of memory: PyTorch measures its peak on a GPU, not on {setting.device}.")
    if setting.command:
        body += f"\n<pre><code>{escape(setting.command)}</code></pre>"
    return Section(f"{setting.model}, {what}", f"{setting.model}-{setting.bench}", drawn, body)


def of_profile(comparison: Comparison) -> Section:
    """Kernel times before and after a recipe, and the tables of the profiles."""
    from samopt import charts

    title = f"Where the time goes, before and after {comparison.recipe}"
    return Section(title, "profile", {"kernels": charts.kernel_time(comparison)}, html_of(comparison))


def of_masks(report: Report, masks: Sequence[MaskComparison]) -> Section:
    """What a recipe did to a model pass by pass, and its masks before and after."""
    return Section(f"Accuracy of {report.recipe}, pass by pass", "masks", {}, html_of(report), masks)


def write(folder: str | Path, sections: Sequence[Section]) -> list[Path]:
    """Writes report.html, which needs no other file, and each chart as SVG and PNG, and the masks as PNG, beside it.

    Args:
        folder: is there, and may hold an earlier report, whose files of the same names are replaced.
        sections: in the order of the page.

    Returns:
        What was written, report.html first.
    """
    from samopt.charts import save, to_svg

    folder = Path(folder)
    written, parts, names = [], [], Counter[str]()
    for number, section in enumerate(sections, start=1):
        names[section.name] += 1
        name = section.name if names[section.name] == 1 else f"{section.name}-{names[section.name]}"
        parts.append(f'<section id="part{number}">\n<h2>{escape(section.title)}</h2>')
        for kind, figure in section.charts.items():
            element = to_svg(figure)
            parts.append(drawing(element, f"{section.title}: {kind}"))
            written += save(figure, folder, f"{name}-{kind}", element)
        parts.append(section.body)
        for index, found in enumerate(section.masks, start=1):
            panels = "\n".join(image(pixels, caption) for caption, pixels in found.panels())
            parts.append(f'<div class="panels">\n{panels}\n</div>')
            written.append(folder / f"{name}-{index}.png")
            found.save(written[-1])
        parts.append("</section>")
    links = (f'<a href="#part{n}">{escape(section.title)}</a>' for n, section in enumerate(sections, start=1))
    whole = page("samopt report", "\n".join(["<nav>", *links, "</nav>", *parts]))
    target = folder / "report.html"
    target.write_text(whole, encoding="utf-8")
    return [target, *written]
