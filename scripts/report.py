"""Tables and plots of runs, from their result.json files alone.

    python scripts/report.py            # finished runs under runs/: printed, and written to runs/*.md with plots
    python scripts/report.py --results  # committed records: results/runs/*.json -> results/*.md, results/plots/*.png
    python scripts/report.py --check    # exit code 1 where the committed tables are not what the records say

Runs of one config file stand in one table where they differ in encoding and seed alone, one row an encoding: over
several seeds the mean (and range).
"""

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jojax import config, extrapolate  # noqa: E402 — the repository's own package, installed or not

NEEDED = ("config", "config_name", "overrides", "seed", "metrics", "parameters", "steps")


def load(paths):
    """Finished runs, by name; a file that is no record is named and left out."""
    records = []
    for path in sorted(paths):
        try:
            record = json.loads(path.read_text())
            if record["state"] == "finished":
                records.append({key: record[key] for key in NEEDED} | record)
        except (ValueError, TypeError, KeyError) as error:
            print(f"left out {path}: no record of a run ({error})", file=sys.stderr)
    return records


OWN = ("encoding", "seed")  # what rows of one table may differ in


def group(record):
    """'length_extrapolation-size=novels': the config file, and all that was changed but the encoding and the seed."""
    path, arg = config.split_spec(record["config_name"])
    rest = [a for a in (arg or "").split(",") if a and a.partition("=")[0] not in OWN]
    changed = [f"{k}={v}" for k, v in sorted(record["overrides"].items()) if k.partition(".")[0] not in OWN]
    return "-".join([path.stem, *rest, *changed]).replace("/", "_")


def encoding(record):
    """The preset, or the module's name; with the options that were given beside it."""
    options = record["config"]["encoding"]
    given = {k.partition(".")[2]: v for k, v in record["overrides"].items() if k.startswith("encoding.")}
    if "preset" not in options:
        given = {k: v for k, v in options.items() if k != "name"}
    return " ".join([options.get("preset", options["name"]), *(f"{k}={v}" for k, v in sorted(given.items()))])


def scale(record):
    c = record["config"]
    m = c["model"]
    size = f"{m['kind']} width {m['width']}, {m['depth']} blocks, {m['heads']} heads"
    data = c["data"]["source"]
    if data in ("text", "tokens"):
        data = Path(c["data"]["train_path"] if data == "text" else c["data"]["path"]).name
    trained = f"{record['steps']:,} steps of batch {c['batch_size']}"
    unit = f", length {c['data']['length']}, vocabulary {c['data']['vocab']}" if m["kind"] == "lm" else ""
    return f"Scale: {size}; {data}{unit}; {trained}."


def cell(values, form, times=1):
    """The mean, of several seeds with the range."""
    values = [math.inf if v is None else times * v for v in values]  # JSON has no infinity
    shown = format(statistics.fmean(values), form)
    return shown if len(values) == 1 else f"{shown} ({min(values):{form}} – {max(values):{form}})"


def text_rows(runs):
    lengths = all_lengths(runs)
    yield ["encoding", "seeds", "parameters", *(f"PPL {n}" for n in lengths), "tail PPL", "bits/byte", "ratio"]
    for name, same in by_encoding(runs):

        def of(length, key, form, same=same):
            rows = [r["extrapolation"]["lengths"].get(length) for r in same]
            return cell([row[key] for row in rows], form) if all(rows) else "–"  # refused beyond a table's end

        last = [
            of(lengths[-1], key, form)
            for key, form in (("tail_ppl", ".2f"), ("bits_per_byte", ".3f"), ("ratio", ".3f"))
        ]
        parameters = f"{same[0]['parameters']['total']:,}"
        yield [name, str(len(same)), parameters, *(of(n, "ppl", ".2f") for n in lengths), *last]


METRICS = {
    "accuracy": ("top-1 %", ".2f", 100),
    "perplexity": ("PPL", ".2f", 1),
    "bits_per_byte": ("bits/byte", ".3f", 1),
}


def metric_rows(runs):
    shown = {key: form for key, form in METRICS.items() if key in runs[0]["metrics"]} | {"loss": ("loss", ".4f", 1)}
    yield ["encoding", "seeds", "parameters", *(name for name, _, _ in shown.values())]
    for name, same in by_encoding(runs):
        cells = [cell([r["metrics"][key] for r in same], form, times) for key, (_, form, times) in shown.items()]
        yield [name, str(len(same)), f"{same[0]['parameters']['total']:,}", *cells]


def all_lengths(runs):
    return sorted({n for run in runs for n in run["extrapolation"]["lengths"]}, key=int)


def by_encoding(runs):
    """(encoding, its runs); of runs with the same seed, which are the same run, one."""
    names = defaultdict(dict)
    for run in runs:
        names[encoding(run)][run["seed"]] = run
    return [(name, list(seeds.values())) for name, seeds in names.items()]


def markdown(rows):
    head, *body = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *body])


def report(records):
    """{group: (markdown text, {encoding: scores} to plot)}"""
    groups = defaultdict(list)
    for record in records:
        groups[group(record)].append(record)
    return {name: section(name, runs) for name, runs in sorted(groups.items())}


def section(name, runs):
    text = all("extrapolation" in run for run in runs)
    lines = [f"## {name}", "", scale(runs[0]), ""]
    if text:
        longest = all_lengths(runs)[-1]
        scored = {f"{row['scored']:,}" for run in runs for row in run["extrapolation"]["lengths"].values()}
        lines += [
            f"The same {' or '.join(sorted(scored))} tokens are scored at every length, in windows inside held-out "
            f"documents; bits/byte and the tail (the last {runs[0]['config']['data']['length']} positions) are at "
            f"{longest}; ratio: its PPL over that at the shortest length.",
            "",
        ]
    rows = list(text_rows(runs) if text else metric_rows(runs))
    lines += [markdown(rows), ""]
    if all(row[1] == "1" for row in rows[1:]):
        lines += ["Every row is a single run: differences of this size can be chance.", ""]
    plots = {n: same[0]["extrapolation"] for n, same in by_encoding(runs)} if text else {}
    return "\n".join(lines), plots


def write(sections, folder, plots):
    for name, (text, scores) in sections.items():
        print(text)
        (folder / f"{name}.md").write_text(text)
        if scores:
            plots.mkdir(exist_ok=True)
            print(f"plot: {extrapolate.plot(scores, plots / f'{name}.png')}\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", action="store_true", help="regenerate results/ from results/runs")
    parser.add_argument("--check", action="store_true", help="compare results/*.md with results/runs")
    args = parser.parse_args()
    if args.results or args.check:
        folder = ROOT / "results"
        sections = report(load((folder / "runs").glob("*.json")))
        if args.results:
            return write(sections, folder, folder / "plots")
        drift = [n for n, (text, _) in sections.items() if not same(folder / f"{n}.md", text)]
        extra = [p.name for p in folder.glob("*.md") if p.stem not in sections and p.name != "README.md"]
        if drift or extra:
            sys.exit(f"results/ is not what its records say ({', '.join(drift + extra)}): run with --results")
        print(f"results/: {len(sections)} tables agree with their records")
        return None
    folder = Path("runs")
    sections = report(load(folder.glob("*/result.json")))
    if not sections:
        sys.exit("no finished run under runs/: train one first (python -m jojax.train --config configs/quickstart.py)")
    return write(sections, folder, folder)


def same(path, text):
    return path.exists() and path.read_text() == text


if __name__ == "__main__":
    main()
