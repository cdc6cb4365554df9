"""The files in bench/results: a benchmark's figures, with what one needs to know to compare them with others."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
LIBRARIES = ("torch", "transformers", "hivemind")


def write_results(name: str, figures: Mapping[str, Any]) -> Path:
    """Write `figures` (JSON values) and their circumstances to bench/results/NAME.json; returns its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    content = {
        "benchmark": name,
        "command": shlex.join(["python", "-m", f"bench.{name}", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpu": _cpu_model(),
            "cpu_count": os.cpu_count(),
            "load_average": os.getloadavg(),
        },
        "versions": {"python": platform.python_version(), **{library: version(library) for library in LIBRARIES}},
        **figures,
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def _cpu_model() -> str:
    """As Linux names it, elsewhere whatever Python knows."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor()
