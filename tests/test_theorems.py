"""The table of theorems: every row holds, the command says so, and a function that is broken makes its rows fail."""

import json

import jax
import jax.numpy as jnp
import pytest

from jojax.algebra import elements, exponential, grid, operators, theorems
from jojax.algebra import journey as jo
from jojax.algebra.theorems import __main__ as command
from jojax.algebra.theorems import comrope, grape, grape_additive, joformer, lattice, statement


@pytest.fixture(scope="module")
def rows():
    assert not jax.config.jax_enable_x64
    found = theorems.rows()
    assert not jax.config.jax_enable_x64  # float64 is the command's own affair
    return found


def test_every_statement_holds(rows):
    assert len(rows) > 70 and len({(row.paper, row.name, row.statement) for row in rows}) == len(rows)
    assert not [row for row in rows if not row.holds]
    assert all(row.residual <= row.tolerance <= 1e-5 and row.counter >= 1e3 * row.tolerance for row in rows)


def test_the_command_prints_a_table_or_json(rows, monkeypatch, capsys):
    monkeypatch.setattr(theorems, "rows", lambda: rows)
    assert command.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"{len(rows)} of {len(rows)} hold" and {row.paper for row in rows} <= set(lines)
    assert sum(line.startswith("  ok  ") for line in lines) == len(rows)
    assert command.main(["--json"]) == 0
    assert [statement.Row(**row) for row in json.loads(capsys.readouterr().out)] == rows
    broken = rows[0]._replace(residual=float("nan"), holds=False)
    monkeypatch.setattr(theorems, "rows", lambda: [broken, *rows[1:]])
    assert command.main([]) == 1
    assert "  FAIL  A1 associativity" in (said := capsys.readouterr().out) and said.endswith("; not A1 associativity\n")


def swapped(x, y):
    return elements.Element(x.content + elements.apply(x.operator, y.content), y.operator @ x.operator)


def one_late(*args, prefix=elements.prefix, **options):
    exclusive, inclusive, last = prefix(*args, **options)
    return inclusive, exclusive, last


def forgetful(*args, prefix=elements.prefix, **options):
    return prefix(*args, **options | {"initial": None})


def backwards(x, angles, *rest, rotate=operators.rotate):
    return rotate(x, -angles, *rest)


def cayley(s):
    one = jnp.eye(s.shape[-1])
    return jnp.linalg.solve(one - s / 2, one + s / 2)


def all_seen(scores, visible):
    return jax.nn.softmax(scores)


CASES = [
    (joformer.associativity, elements, "compose", swapped),
    (joformer.fold, elements, "prefix", one_late),
    (joformer.journey, jo, "prefix", one_late),
    (joformer.rope, jo, "rotate", backwards),
    (joformer.streaming, elements, "prefix", forgetful),
    (joformer.unrolled, jo, "compose", lambda x, y, compose=elements.compose: compose(y, x)),
    (joformer.causality, jo, "weights", all_seen),
    (lattice.interchange, grid, "apply", lambda r, v: v),
    (lattice.stokes, grid, "both_ways", lambda *args, f=grid.both_ways: f(*args)[::-1]),
    (lattice.pure_gauge, grid, "prefix", one_late),
    (lattice.toral_scores, operators, "rotate", backwards),
    (comrope.commuting, operators, "exp_skew", cayley),
    (comrope.structure, exponential, "exp_phases", lambda b, s, f=exponential.exp_phases: f(b, -s)),
    (grape.rodrigues, operators, "skew", lambda a: a.swapaxes(-1, -2) - a),
    (grape.phase, elements, "prefix", one_late),
    (grape_additive.fox, elements, "prefix", one_late),
    (grape_additive.path_gradient, jo, "weights", all_seen),
]


@pytest.mark.parametrize(("theorem", "module", "name", "broken"), CASES, ids=lambda v: getattr(v, "name", None))
def test_a_broken_function_fails_its_row(theorem, module, name, broken, monkeypatch):
    """The sign or the order of one of jojax's functions, or what it takes along."""
    monkeypatch.setattr(module, name, broken)
    statement.forget()
    with jax.enable_x64(True):
        row = theorem.row("")
    statement.forget()
    assert not row.holds and not row.residual <= 1e3 * row.tolerance
