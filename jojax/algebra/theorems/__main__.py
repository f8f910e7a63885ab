"""python -m jojax.algebra.theorems [--json]: every statement with its residual. Exit code 1 where one fails."""

import argparse
import itertools
import json
import sys

from jojax.algebra import theorems
from jojax.algebra.theorems.statement import Row


def table(rows: list[Row]) -> str:
    """A block a paper: statement, residual ≤ tolerance, and what breaks it with its residual."""
    wide = [max(len(getattr(row, part)) for row in rows) for part in ("name", "statement")]
    lines = []
    for paper, group in itertools.groupby(rows, lambda row: row.paper):
        lines += ["", paper, f"  {'':{sum(wide) + 8}} residual  tolerance    broken  by"]
        for row in group:
            lines.append(
                f"  {'ok  ' if row.holds else 'FAIL'}  {row.name:{wide[0]}}  {row.statement:{wide[1]}} "
                f"{row.residual:9.1e}  {row.tolerance:9.0e}  {row.counter:8.1e}  {row.broken_by}"
            )
    return "\n".join(lines[1:])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jojax.algebra.theorems", description=theorems.__doc__)
    parser.add_argument("--json", action="store_true", help="a list of rows as JSON")
    options = parser.parse_args(arguments)
    rows = theorems.rows()
    failed = [row.name for row in rows if not row.holds]
    if options.json:
        print(json.dumps([row._asdict() for row in rows], indent=1, ensure_ascii=False))
    else:
        print(table(rows))
        print(f"\n{len(rows) - len(failed)} of {len(rows)} hold" + (f"; not {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
