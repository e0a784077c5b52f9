"""Plots as SVG, by a few lines: horizontal bars, and lines over numbers on a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from benchmarks.harness import shown

COLORS = ("#2563eb", "#d97706", "#059669", "#7c3aed")
WIDTH = 720
_LABELS = 230
_BAR = 18


def bars(unit: str, rows: Mapping[str, Sequence[float]], series: Sequence[str]) -> str:
    """A bar for each value of each row; the longest is the largest value."""
    most = max((value for values in rows.values() for value in values), default=0) or 1
    parts, y = [], 30
    for name, values in rows.items():
        parts.append(_text(_LABELS - 8, y + _BAR * len(values) / 2 + 4, name, anchor="end"))
        for color, value in zip(COLORS, values):
            width = max(1.0, value / most * (WIDTH - _LABELS - 80))
            parts.append(f'<rect x="{_LABELS}" y="{y}" width="{width:.1f}" height="{_BAR - 3}" fill="{color}"/>')
            parts.append(_text(_LABELS + width + 6, y + 12, shown(value)))
            y += _BAR
        y += 8
    return _svg(y + 6, [*_legend(unit, series), *parts])


def lines(unit: str, rows: Mapping[str, Sequence[float]], series: Sequence[str]) -> str:
    """A line for each series, over the names of the rows, which are numbers."""
    height, left, bottom = 260, 70, 220
    places = [math.log10(float(name)) for name in rows]
    first, span = places[0], (places[-1] - places[0]) or 1
    most = max(value for values in rows.values() for value in values) or 1
    xs = [left + (place - first) / span * (WIDTH - left - 60) for place in places]
    parts = [f'<path d="M{left} 30V{bottom}H{WIDTH - 20}" fill="none" stroke="#94a3b8"/>']
    parts += [_text(x, bottom + 18, f"{int(name):,}", anchor="middle") for x, name in zip(xs, rows)]
    parts += [_text(left - 6, 40, shown(most), anchor="end"), _text(left - 6, bottom, "0", anchor="end")]
    for index, color in enumerate(COLORS[: len(series)]):
        ys = [bottom - values[index] / most * (bottom - 40) for values in rows.values()]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in zip(xs, ys)]
    return _svg(height, [*_legend(unit, series), *parts])


def _legend(unit: str, series: Sequence[str]) -> list[str]:
    if len(series) == 1:
        return [_text(_LABELS, 18, unit)]
    parts, x = [], _LABELS
    for color, name in zip(COLORS, series):
        parts += [f'<rect x="{x}" y="8" width="12" height="12" fill="{color}"/>', _text(x + 18, 18, name)]
        x += 40 + 8 * len(name)
    return parts


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(height: float, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" font-family="sans-serif" '
    ground = f'<rect width="{WIDTH}" height="{height:.0f}" fill="white"/>'
    return "\n".join([f'{head}font-size="12" fill="#0f172a">', ground, *parts, "</svg>"]) + "\n"
