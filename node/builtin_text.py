"""The text that every CPython brings along: the language reference's topics and the docstrings of its library."""

import ast
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

LEFT_OUT = frozenset(
    {
        # Not the library itself, or machine-made tables with hardly a sentence in them.
        "test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings",
        # Distributions of Python ship these separately: with them, equal versions would give different texts.
        "idlelib", "lib2to3", "tkinter", "turtledemo", "distutils", "ensurepip", "msilib",
    }
)  # fmt: skip
"""Folders of the standard library that give no text."""


def topic_texts() -> list[str]:
    """The reference texts behind `help("TOPIC")`, in the order of their names."""
    return [topics[name] for name in sorted(topics)]


def module_texts() -> Iterator[str]:
    """For each module of the standard library that has docstrings, these in source order; modules in path order."""
    for path in _library_files(Path(sysconfig.get_path("stdlib"))):
        if text := "\n\n".join(_docstrings(ast.parse(path.read_bytes()))):
            yield text


def _library_files(root: Path) -> list[Path]:
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        # The build's own settings differ from one machine to the next.
        subfolders[:] = [name for name in subfolders if name not in LEFT_OUT and not name.startswith("config-")]
        files += [Path(folder, name) for name in names if name.endswith(".py") and not name.startswith("_sysconfig")]
    return sorted(files, key=lambda path: path.relative_to(root).parts)


def _docstrings(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    if text := ast.get_docstring(node):
        yield text
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings(child)
