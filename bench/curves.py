"""Loss curves of several runs: as a table for the terminal and as a picture."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

WIDTH = 12
LOSS_TICKS = (1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0)


@dataclass(frozen=True, slots=True)
class Curve:
    """Held-out loss over one run."""

    steps: list[int]
    """Optimiser steps that every node has taken, at each point."""
    losses: list[float]
    """At each point, nats per byte."""
    tokens: int
    """That all nodes together have trained on."""
    planned_tokens: int
    """More than `tokens` when work came too late to count."""
    seconds: float
    """Wall time of the whole run."""


def table(curves: Mapping[str, Curve]) -> Iterator[str]:
    """Lines with a column for each curve and a row for each point; the last two rows are tokens and seconds."""
    yield _row("steps", curves)
    shown = list(curves.values())
    for index, step in enumerate(shown[0].steps):
        yield _row(f"{step}", (f"{curve.losses[index]:.3f}" for curve in shown))
    yield _row("tokens", (f"{curve.tokens:,}" for curve in shown))
    yield _row("seconds", (f"{curve.seconds:.0f}" for curve in shown))


def _row(head: str, cells: Mapping[str, Curve] | Iterator[str]) -> str:
    return f"{head:>8}" + "".join(f"{cell:>{WIDTH + 2}}" for cell in cells)


def draw(curves: Mapping[str, Curve], title: str, path: Path) -> Path:
    """Draw the curves into the PNG file `path`, losses on a logarithmic axis; returns `path`."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, curve in curves.items():
        label = f"{name}: {curve.losses[-1]:.3f} after {curve.tokens / 1e3:.0f}k tokens"
        axes.plot(curve.steps, curve.losses, marker="o", markersize=3, label=label)
    axes.set_yscale("log")
    axes.set_yticks(LOSS_TICKS)
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set(title=title, xlabel="optimiser steps of every node", ylabel="held-out loss (nats per byte)")
    lowest = min(min(curve.losses) for curve in curves.values())
    highest = max(max(curve.losses) for curve in curves.values())
    axes.set_ylim(lowest * 0.95, highest * 1.05)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    return path
