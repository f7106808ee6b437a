"""Line charts as inline SVG: axes with ticks and units, a legend, marks; colours come from the page's style."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from attrs import field, frozen

__all__ = ["SERIES", "Chart", "Line", "Mark"]

SERIES = 4
"""How many lines a chart can tell apart: the page's style has so many colours (``--line-0`` and so on)."""

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 68, 16, 12, 46
_INNER_W, _INNER_H = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
_MOST_POINTS = 600
_SMALLEST = 1e-300


@frozen
class Line:
    """A line of a chart: its name in the legend and its points; with ``steps`` a value holds until the next point."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    steps: bool = False


@frozen
class Mark:
    """A dashed line at one x, such as a target; ``of``: the line in whose colour."""

    label: str
    x: float
    of: int = 0


@frozen
class Chart:
    """A chart of up to :data:`SERIES` lines; axes begin at 0 unless ``log_x``. ``percent``: y is a share."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    marks: Sequence[Mark] = ()
    log_x: bool = False
    percent: bool = False
    note: str = field(default="", kw_only=True)

    def svg(self) -> str:
        """Return the figure as HTML."""
        lines = [one for one in self.lines if len(one.xs)]
        if not lines:
            return ""
        marks = [one for one in self.marks if not self.log_x or one.x > 0.0]
        xs = [x for one in lines for x in (min(one.xs), max(one.xs))] + [one.x for one in marks]
        x_axis = _LogAxis(xs, LEFT, LEFT + _INNER_W) if self.log_x else _Axis(xs, LEFT, LEFT + _INNER_W, tight=True)
        ys = [0.0, 1.0] if self.percent else [max(one.ys) for one in lines]
        y_axis = _Axis(ys, TOP + _INNER_H, TOP)
        label = escape(f"{self.title}: {self.y_label} over {self.x_label}")
        parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">']
        parts += _grid(x_axis, y_axis, self.percent)
        parts.append(_text(LEFT + _INNER_W / 2, HEIGHT - 8, self.x_label, "middle", "label"))
        turn = f'transform="rotate(-90 14 {TOP + _INNER_H / 2})"'
        parts.append(_text(14, TOP + _INNER_H / 2, self.y_label, "middle", "label", turn))
        for one in marks:
            x = x_axis.place(one.x)
            parts.append(
                f'<line class="mark line-{one.of}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{TOP + _INNER_H}">'
            )
            parts.append(f"<title>{escape(one.label)}</title></line>")
        for at, line in enumerate(lines):
            parts.append(f'<path class="line line-{at}" d="{_path(line, x_axis, y_axis)}"/>')
        parts.append("</svg>")
        return (
            f"<figure><figcaption><h3>{escape(self.title)}</h3>{self._legend(lines, marks)}</figcaption>"
            f"{''.join(parts)}{f'<p class=note>{escape(self.note)}</p>' if self.note else ''}</figure>"
        )

    def _legend(self, lines: Sequence[Line], marks: Sequence[Mark]) -> str:
        items = [f'<span class="key line-{at}">{escape(one.name)}</span>' for at, one in enumerate(lines)]
        items += [f'<span class="key dashed line-{one.of}">{escape(one.label)}</span>' for one in marks]
        return f'<p class="legend">{"".join(items)}</p>'


class _Axis:
    """A linear axis from 0 to a round number over the largest value (``tight``: to that value), between two places of
    the picture."""

    def __init__(self, values: Sequence[float], start: float, end: float, *, tight: bool = False) -> None:
        most = max([*values, 0.0])
        most = most if most >= _SMALLEST else 1.0  # less is drawn as nothing
        self.step = _round_step(most / 5)
        self.low = 0.0
        self.high = most if tight else max(self.step, math.ceil(most / self.step - 1e-9) * self.step)
        self.start, self.end = start, end

    def place(self, value: float) -> float:
        """Return where a value lies."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return the values that have a label."""
        return [at * self.step for at in range(math.floor(self.high / self.step + 1e-9) + 1)]

    def minor(self) -> list[float]:
        """Return values that have a line and no label: none."""
        return []


class _LogAxis:
    """A logarithmic axis over whole powers of ten; what is not over 0 lies at its start."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        above = [one for one in values if one > 0.0] or [1.0]
        self.low = max(math.floor(math.log10(min(above)) + 1e-9), -6)
        self.high = max(math.ceil(math.log10(max(above)) - 1e-9), self.low + 1)
        self.start, self.end = start, end

    def place(self, value: float) -> float:
        """Return where a value lies."""
        power = math.log10(value) if value > 0.0 else self.low
        share = (min(max(power, self.low), self.high) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return the values that have a label."""
        return [10.0**power for power in range(self.low, self.high + 1)]

    def minor(self) -> list[float]:
        """Return values that have a line and no label."""
        return [digit * 10.0**power for power in range(self.low, self.high) for digit in range(2, 10)]


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is not under ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= least * (1 - 1e-9))


def _grid(x_axis: _Axis | _LogAxis, y_axis: _Axis, percent: bool) -> list[str]:
    parts = []
    for value in y_axis.ticks():
        y = y_axis.place(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + _INNER_W}" y1="{y:.1f}" y2="{y:.1f}"/>')
        shown = f"{100 * value:g} %" if percent else _short(value)
        parts.append(_text(LEFT - 6, y + 4, shown, "end", "tick"))
    for value in x_axis.minor():
        x = x_axis.place(value)
        parts.append(f'<line class="grid minor" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{TOP + _INNER_H}"/>')
    for value in x_axis.ticks():
        x = x_axis.place(value)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{TOP + _INNER_H}"/>')
        parts.append(_text(x, TOP + _INNER_H + 16, _short(value), "middle", "tick"))
    return parts


def _path(line: Line, x_axis: _Axis | _LogAxis, y_axis: _Axis) -> str:
    """Return the path of a line, of the points that can be told apart at its width."""
    every = max(1, len(line.xs) // _MOST_POINTS)
    xs, ys = list(line.xs[::every]), list(line.ys[::every])
    if (len(line.xs) - 1) % every:
        xs.append(line.xs[-1])
        ys.append(line.ys[-1])
    parts: list[str] = []
    for x, y in zip(xs, ys, strict=True):
        place_x, place_y = f"{x_axis.place(x):.1f}", f"{y_axis.place(y):.1f}"
        if not parts:
            parts.append(f"M{place_x} {place_y}")
        elif line.steps:
            parts.append(f"H{place_x}V{place_y}")
        else:
            parts.append(f"L{place_x} {place_y}")
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str, kind: str, more: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'


def _short(value: float) -> str:
    """Return a number for an axis: 1500 as 1.5k."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:.6g}"
