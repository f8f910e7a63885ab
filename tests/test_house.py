"""The rules of the house: who may import whom, how long files and functions may be, what an import may cost."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(p for folder in ("jojax", "configs", "scripts") for p in (ROOT / folder).rglob("*.py"))
LIBRARY = [p for p in FILES if p.is_relative_to(ROOT / "jojax")]

# what a room may import of the house; a file in no row may import all above it
LEAVES = {"errors", "tree", "seal", "losses", "metrics", "clock", "writer", "shard", "optim", "config", "cli"}
ALLOWED = {
    "algebra": {"algebra"},
    "encodings": {"algebra", "encodings", "errors"},
    "models": {"algebra", "encodings", "models", "errors", "losses"},
    "data": {"data", "errors"},
    **{leaf: LEAVES for leaf in LEAVES},
    "state": LEAVES,
    "step": LEAVES | {"state"},
    "checkpoint": LEAVES,
    "result": LEAVES | {""},
    "task": LEAVES | {"models", "data", "encodings"},
    "evaluate": LEAVES | {"models", "data", "encodings", "task", "checkpoint", "extrapolate"},
    "extrapolate": LEAVES | {"data", "encodings", "evaluate"},
}


def room(path):
    parts = path.relative_to(ROOT / "jojax").with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def imported(path):
    """(top package, room) of every import in a file, those inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module]
            if node.module == "jojax":
                names = [f"jojax.{a.name}" if not a.name.startswith("_") else "jojax" for a in node.names]
        else:
            continue
        for name in names:
            top, _, rest = name.partition(".")
            yield top, rest.partition(".")[0]


@pytest.mark.parametrize("path", LIBRARY, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path):
    for top, target in imported(path):
        assert top not in ("configs", "scripts", "tests"), f"{path} imports {top}"
        assert top != "tensorflow", f"{path} imports TensorFlow"
        if top == "jojax" and room(path) in ALLOWED:
            assert target in ALLOWED[room(path)], f"{path.name} may not import jojax.{target}"


def test_algebra_knows_no_flax_and_configs_no_jax():
    for path in LIBRARY:
        if room(path) == "algebra":
            assert not {"flax", "optax"} & {top for top, _ in imported(path)}
    for path in (ROOT / "configs").glob("*.py"):
        assert {top for top, _ in imported(path)} <= {"configs", "ml_collections"}, path


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_short(path):
    text = path.read_text()
    assert text.count("\n") <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno + 1 <= 60, f"{path}: {node.name}"


def test_importing_jojax_is_light():
    heavy = "{'jax', 'flax', 'numpy', 'tensorflow'} & set(sys.modules)"
    found = subprocess.check_output([sys.executable, "-c", f"import sys, jojax; print({heavy})"], text=True, cwd=ROOT)
    assert found.strip() == "set()"
