"""Tables and plots of runs, from their result.json files alone, and the papers' figures beside them.

    python scripts/report.py            # finished runs under runs/: printed, and written to runs/ with plots
    python scripts/report.py --results  # committed records: results/runs/*.json and results/paper.csv -> results/;
                                        # its own tables and plots that no record is behind any more are removed
    python scripts/report.py --check    # exit code 1 where the committed files are not what the records say

A table is written as Markdown (.md) and as figures (.csv); index.html has all tables and plots on one page. Runs of one
config file stand in one table where they differ in encoding, rate and seed alone, one row an encoding.
"""

import argparse
import csv
import io
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.tables import page, papers, records, runs  # noqa: E402 — the repository's own, installed or not

NOT_FROM_RUNS = ("README.md", "paper.csv", "preflight.md")


def collect(folder, paths):
    """(sections of the papers, where the folder has their figures; sections of the runs)."""
    found = records.load(paths)
    figures = folder / "paper.csv"
    return papers.sections(papers.read(figures), found) if figures.exists() else [], runs.sections(found)


def files(of_papers, of_runs, plots):
    """{name: text} of all that is generated, without the plots. The page needs the plots."""
    sections = [*of_papers, *of_runs]
    out = {f"{s.name}.md": page.markdown(s) for s in sections} | {f"{s.name}.csv": table(s.csv) for s in sections}
    return out | {"index.html": page.page(sections, plots)}


def table(rows):
    """CSV; numbers that are not whole with six significant digits."""
    text = io.StringIO()
    lines = [[format(c, ".6g") if isinstance(c, float) else c for c in row] for row in rows]
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def draw(sections, plots):
    from PIL import Image

    for section in sections:
        for name, plot in section.plots.items():
            plots.mkdir(exist_ok=True)
            path = plot(plots / f"{name}.png")
            Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)  # a third of the size
            yield path


def left_over(folder, sections):
    """Tables made here of sections that are no more; by how they begin none that was written by hand."""
    heads = tuple(table([head]) for head in (runs.HEAD, papers.CSV_HEAD))
    made = {section.name for section in sections}
    for path in sorted([*folder.glob("*.md"), *folder.glob("*.csv")]):
        titles = (f"## {path.stem}\n", f"## Published figures: {path.stem.removeprefix('papers-')}\n")
        if path.stem not in made and path.read_text().startswith(titles if path.suffix == ".md" else heads):
            yield path


def remove_left_over(folder, sections, plots):
    old = list(left_over(folder, sections))
    known = {name for section in sections for name in section.plots}
    for stem in {path.stem for path in old} | {section.name for section in sections}:
        for name in {stem, f"{stem}-attention"} - known:
            (plots / f"{name}.png").unlink(missing_ok=True)
    for path in old:
        path.unlink()
        print(f"removed: {path}")


def write(folder, paths, plots, tidy=False):
    of_papers, of_runs = collect(folder, paths)
    if tidy:
        remove_left_over(folder, [*of_papers, *of_runs], plots)
    drawn = list(draw(of_runs, plots))
    for name, text in files(of_papers, of_runs, plots).items():
        (folder / name).write_text(text)
    for section in of_runs:
        print(page.markdown(section))
    for path in [*drawn, folder / "index.html"]:
        print(f"written: {path}")


def check(folder, plots):
    """UserError-like exit that names every file that is not what the records say."""
    of_papers, of_runs = collect(folder, (folder / "runs").glob("*.json"))
    made = files(of_papers, of_runs, plots)
    drift = [name for name, text in made.items() if not same(folder / name, text)]
    drift += [f"{n}.png" for section in of_runs for n in section.plots if not (plots / f"{n}.png").exists()]
    there = [p.name for kind in ("*.md", "*.csv", "*.html") for p in sorted(folder.glob(kind))]
    drift += [name for name in there if name not in made and name not in NOT_FROM_RUNS]
    if drift:
        ours = {*made, *NOT_FROM_RUNS, *(p.name for p in left_over(folder, [*of_papers, *of_runs]))}
        foreign = ", ".join(name for name in there if name not in ours)
        remedy = "run with --results" + (f"; not made by it, to be moved elsewhere: {foreign}" if foreign else "")
        sys.exit(f"results/ is not what its records say ({', '.join(drift)}): {remedy}")
    print(f"results/: {len(made)} files agree with their records")


def same(path, text):
    return path.exists() and path.read_text() == text


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", action="store_true", help="regenerate results/ from results/runs")
    parser.add_argument("--check", action="store_true", help="compare results/ with results/runs")
    args = parser.parse_args()
    folder = ROOT / "results"
    if args.check:
        return check(folder, folder / "plots")
    if args.results:
        return write(folder, (folder / "runs").glob("*.json"), folder / "plots", tidy=True)
    folder = Path("runs")
    paths = list(folder.glob("*/result.json"))
    if not records.load(paths):
        sys.exit("no finished run under runs/: train one first (python -m jojax.train --config configs/quickstart.py)")
    return write(folder, paths, folder)


if __name__ == "__main__":
    main()
