"""How reports and profiles are shown: as text where they are printed, and as HTML in a notebook."""

from __future__ import annotations

import abc
import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH = 130  # characters, where nothing says how wide a terminal is


class Shown(abc.ABC):
    """What has a `__rich__`, and is shown everywhere as that says: rich prints it, `print` and notebooks too."""

    @abc.abstractmethod
    def __rich__(self) -> RenderableType:
        """Tables and texts of rich, or a group of them."""

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(
            file=io.StringIO(), width=WIDTH, record=True, color_system=None, force_terminal=False, force_jupyter=False
        )
        console.print(self)
        return console.export_text().rstrip()

    def _repr_html_(self) -> str:
        from samopt.html_page import html_of

        return html_of(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """What IPython shows: the same text where there is no HTML, in place of the `repr`, which is for debugging."""
        return {"text/plain": str(self), "text/html": self._repr_html_()}
