"""The scales of a chart: where a value is drawn, which ticks there are. The SVG templates write the rest."""

import math
from dataclasses import dataclass, field

from .style import Look, count

Points = list[tuple[float, float]]

WIDTH, HEIGHT = 400, 262
LEFT, RIGHT, TOP, BOTTOM = 50, 392, 40, 224


@dataclass(frozen=True)
class Line:
    mixer: str
    points: Points
    band: list[tuple[float, float, float]] = field(default_factory=list)  # (x, low, high), over seeds


@dataclass(frozen=True)
class Panel:
    """One pair of axes, linear unless `log`."""

    id: str
    title: str  # of the vertical axis, written above it
    x: str
    lines: list[Line]
    heading: str = ""  # above the title: what this panel of several is about
    log: str = ""  # "x" or "xy"
    rings: Points = field(default_factory=list)  # marked places: crossings
    scatter: bool = False
    reach: tuple[float, float] | None = None  # of the vertical axis, if not that of the points


class Scale:
    """Maps a value to its place between `start` and `end` of the drawing, with room at both ends."""

    def __init__(self, values: list[float], start: float, end: float, log: bool = False):
        self.start, self.end, self.log = start, end, log
        self.low, self.high = self._measure(min(values)), self._measure(max(values))
        room = 0.06 * (self.high - self.low) or 0.06 * abs(self.high) or 1.0
        self.low, self.high = self.low - room, self.high + room

    def _measure(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def __call__(self, value: float) -> float:
        share = (self._measure(value) - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """Round values within the scale, at most eight."""
        if self.log:
            heads = (1, 2, 5) if self.high - self.low < 2.3 else (1,)
            powers = range(math.floor(self.low), math.ceil(self.high))
            found = [head * 10.0**power for power in powers for head in heads]
        else:
            rough = (self.high - self.low) / 6
            size = 10 ** math.floor(math.log10(rough))
            step = next(head * size for head in (1, 2, 2.5, 5, 10) if head * size >= rough)
            first = math.ceil(self.low / step)
            found = [float(f"{step * i:.6g}") for i in range(first, first + 8)]
        inside = [value for value in found if self.low <= self._measure(value) <= self.high]
        return inside[:: -(-len(inside) // 8) or 1]


class Drawing:
    """A panel with its scales."""

    def __init__(self, panel: Panel, looks: dict[str, Look]):
        self.panel = panel
        across = [x for line in panel.lines for x, _ in line.points]
        down = [y for line in panel.lines for _, y in line.points]
        for line in panel.lines:
            down += [end for _, low, high in line.band for end in (low, high)]
        if panel.reach:
            down = [*panel.reach]
        if "y" in panel.log and max(down) < 4 * min(down):  # a flat line must not look steep
            down += [min(down) / 2, max(down) * 2]
        self.x = Scale(across, LEFT, RIGHT, "x" in panel.log)
        self.y = Scale(down, BOTTOM, TOP, "y" in panel.log)
        self.ticks = [(value, count(value)) for value in self.x.ticks()]
        if panel.log:  # the lengths themselves, as far as there is room
            lengths = sorted(set(across))
            self.ticks = [(value, f"{value:,g}") for value in lengths[:: -(-len(lengths) // 6)]]
        order = list(looks)
        self.lines = sorted(panel.lines, key=lambda line: -order.index(line.mixer))  # the first on top

    def path(self, points: Points) -> str:
        return "M" + "L".join(f"{self.x(x):g} {self.y(y):g}" for x, y in points)

    def band(self, line: Line) -> str:
        low, high = ([(x, ends[i]) for x, *ends in line.band] for i in (0, 1))
        return self.path(low + high[::-1])

    def marks(self, line: Line) -> Points:
        """Where the line has markers: at eight of its points or so, inside the frame."""
        places = [(self.x(x), self.y(y)) for x, y in line.points[:: max(1, len(line.points) // 8)]]
        return [(x, y) for x, y in places if y >= TOP]
