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
LEAVES = {
    "errors",
    "tree",
    "seal",
    "losses",
    "metrics",
    "clock",
    "writer",
    "shard",
    "hosts",
    "optim",
    "config",
    "cli",
    "mixing",
    "stages",
}
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
    "extrapolate": LEAVES | {"data", "encodings", "task"},
    "laws": LEAVES | {"models", "encodings", "laws"},
}


def room(path):
    parts = path.relative_to(ROOT / "jojax").with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def imports(path):
    """The dotted name of every import in a file, those inside functions too; for `from a import b`, a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported(path):
    """(top package, room) of every import in a file."""
    for name in imports(path):
        top, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        yield top, "" if target.startswith("__") else target


def names(root, path):
    """The dotted name of a module; a package's is that of its folder."""
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circle(root):
    """The first circle among the modules under a package's folder, as a list of names, or None."""
    modules = {names(root, path): path for path in root.rglob("*.py")}

    def loaded(name, target):
        """What an import runs: the module, or the one that has the thing, and the packages around it."""
        target = target if target in modules else target.rpartition(".")[0]
        parts = target.split(".")
        around = {".".join(parts[: n + 1]) for n in range(len(parts))} & modules.keys()
        return {n for n in around if not f"{name}.".startswith(f"{n}.")}

    graph = {name: set().union(*(loaded(name, n) for n in imports(path))) for name, path in modules.items()}
    done = set()

    def visit(name, way):
        if name in way:
            return [*way[way.index(name) :], name]
        if name not in done:
            for target in sorted(graph[name]):
                if found := visit(target, [*way, name]):
                    return found
            done.add(name)
        return None

    return next(filter(None, (visit(name, []) for name in sorted(graph))), None)


def test_no_modules_import_each_other_in_a_circle():
    assert circle(ROOT / "jojax") is None


def test_a_circle_is_found(tmp_path):
    """Also through a package, and where one import hides in a function."""
    root = tmp_path / "house"
    (root / "inner").mkdir(parents=True)
    for path, text in {
        "__init__.py": "",
        "a.py": "from house import b",
        "b.py": "def later():\n    from house.inner.c import thing",
        "inner/__init__.py": "from house.inner.c import thing\nimport house.d",
        "inner/c.py": "import ast",
        "d.py": "import ast",
    }.items():
        (root / path).write_text(text)
    assert circle(root) is None
    (root / "d.py").write_text("from house.a import name")
    assert circle(root) == ["house.a", "house.b", "house.inner", "house.d", "house.a"]


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


@pytest.mark.parametrize("name", ["train", "evaluate", "generate", "harness", "show"])
def test_commands_that_run_models_keep_what_they_compiled(name):
    assert "    cli.keep_compiled()\n" in (ROOT / "jojax" / f"{name}.py").read_text().split("\ndef main(")[1]


def test_importing_jojax_is_light():
    heavy = "{'jax', 'flax', 'numpy', 'tensorflow'} & set(sys.modules)"
    found = subprocess.check_output([sys.executable, "-c", f"import sys, jojax; print({heavy})"], text=True, cwd=ROOT)
    assert found.strip() == "set()"
