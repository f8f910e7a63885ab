"""The papers' statements as checks: `python -m jojax.algebra.theorems` prints them all, `--json` as JSON.

Each row stands beside a case that must break it; `rows()` runs them, in float64.
"""

import jax

from jojax.algebra.theorems import comrope, grape, grape_additive, joformer, lattice, statement
from jojax.algebra.theorems.statement import Row

PAPERS = (joformer, lattice, comrope, grape, grape_additive)


def rows() -> list[Row]:
    """All statements of all papers, run now."""
    statement.forget()
    with jax.enable_x64(True):
        return [row for paper in PAPERS for row in statement.rows(paper)]
