"""A widget of Textual that draws lines of (text, style) parts, at little cost: no layout, no CSS, no markup."""

from functools import cache

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip
from textual.widget import Widget

from producer.monitor.grid import STYLES, Line


@cache
def _style(name: str) -> Style:
    return Style.parse(STYLES[name])


class LinesWidget(Widget):
    """Draws what `made` gives, whenever `changed` was called or the size is another one."""

    DEFAULT_CSS = "LinesWidget { width: 100%; height: 100%; }"

    def __init__(self) -> None:
        super().__init__()
        self._strips: list[Strip] = []
        self._drawn_size = (0, 0)

    def made(self, width: int, height: int) -> list[Line]:
        """The lines for a screen of that size."""
        raise NotImplementedError

    def changed(self) -> None:
        """Draw anew what differs from what stands there."""
        self._drawn_size = (0, 0)
        self.refresh()

    def render_line(self, y: int) -> Strip:
        size = self.size.width, self.size.height
        if size != self._drawn_size:
            self._drawn_size = size
            self._strips = [_strip(line, size[0]) for line in self.made(*size)]
        return self._strips[y] if y < len(self._strips) else Strip.blank(size[0])


def _strip(line: Line, width: int) -> Strip:
    return Strip([Segment(text, _style(style)) for text, style in line]).adjust_cell_length(width)
