"""Draws the output of `make demo` as it looks in a terminal: `python -m bench.demo_picture < output.txt`."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PICTURE = Path("docs/demo.png")
COLUMNS = 112


def main() -> None:
    """Read the output on standard input and write the picture."""
    lines = [line.rstrip("\n") for line in sys.stdin]
    lines = [line[:COLUMNS] + "..." if len(line) > COLUMNS + 3 else line for line in lines]
    figure = plt.figure(figsize=(10.4, 0.18 * len(lines) + 0.4), facecolor="#11151c")
    figure.text(
        0.02,
        0.98,
        "\n".join(["$ make demo", *lines]),
        va="top",
        family="DejaVu Sans Mono",
        size=9,
        color="#d8dee9",
        linespacing=1.35,
        parse_math=False,
    )
    figure.savefig(PICTURE, dpi=110, facecolor=figure.get_facecolor())


if __name__ == "__main__":
    main()
