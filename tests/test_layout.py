"""The shape of the repository: whose packages are imported, what stays light, and what has no place in the code."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("swarm", "node", "model", "bootstrap")
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "torch.jit.load"}


@pytest.mark.parametrize("package", PACKAGES)
def test_package_is_typed_and_comes_from_this_repository(package: str) -> None:
    assert import_module(package).__file__ == str(ROOT / package / "__init__.py")
    assert (ROOT / package / "py.typed").is_file()
    assert set(packages_distributions().get(package, [])) <= {"spes-node"}


def test_files_are_short() -> None:
    folders = (*PACKAGES, "tests", "bench", "docker")
    suffixes = {".py", ".toml", ".html", ".css", ".js"}
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {name: length for name, length in lengths.items() if length > 600} == {}


@pytest.mark.parametrize("module", ["bootstrap.run_file", "swarm.manifest"])
def test_reading_a_run_loads_no_heavy_library(module: str) -> None:
    program = (
        f"import sys, {module}; print(sorted({{'torch', 'transformers', 'hivemind', 'datasets'}} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_code_neither_unpickles_nor_evaluates() -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert [f"{path.relative_to(ROOT)}: {name}" for path in files for name in unsafe_names(path.read_text())] == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "import os, pickle as p",
        "from yaml import safe_load",
        "from torch import load",
        "torch.load(f)",
        "torch.load(f, weights_only=True)",
        "print(eval('1'))",
        "numpy.load(f, allow_pickle=True)",
    ],
)
def test_unsafe_code_is_found(code: str) -> None:
    assert list(unsafe_names(code))


def test_safe_code_is_left_alone() -> None:
    assert not list(unsafe_names("import json\nmodel.eval()\njson.load(f)\nnumpy.load(f, allow_pickle=False)"))


def unsafe_names(code: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name.split(".")[0] in UNSAFE_MODULES)
            case ast.ImportFrom(module=str(module), names=names):
                imported = {f"{module}.{alias.name}" for alias in names}
                yield from (name for name in imported if name in UNSAFE_CALLS or name.split(".")[0] in UNSAFE_MODULES)
            case ast.Call(func=function, keywords=keywords):
                if ast.unparse(function) in UNSAFE_CALLS:
                    yield ast.unparse(function)
                unpickles = [keyword.value for keyword in keywords if keyword.arg == "allow_pickle"]
                if any(ast.unparse(value) != "False" for value in unpickles):
                    yield "allow_pickle"
