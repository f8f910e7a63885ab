"""Tables of our own runs: one a config file, one row an encoding, the mean over seeds with its interval."""

import functools
import re
from collections import defaultdict
from typing import Any, NamedTuple

from jojax import extrapolate
from scripts.tables import attention, records
from scripts.tables.page import Section
from scripts.tables.stats import interval, paired, shown

BASELINES = ("rope", "rope_axial", "rope_axial_qk", "rope_unit10k")
CONTROL = "rope_matched"
GAPS = "Differences between runs of a seed, mean ± half of its 95 % interval (not corrected for the number of rows):"
METRICS = (
    ("accuracy", "top-1 %", ".2f", 100),
    ("perplexity", "PPL", ".2f", 1),
    ("bits_per_byte", "bits/byte", ".3f", 1),
    ("loss", "loss", ".4f", 1),
)


class Column(NamedTuple):
    """title; format; of(run) -> the figure, None where the run has none."""

    title: str
    form: str
    of: Any


def metrics(runs):
    def of(run, key, times):
        return times * records.number(run["metrics"][key]) if key in run["metrics"] else None

    return [
        Column(title, form, functools.partial(of, key=key, times=times))
        for key, title, form, times in METRICS
        if any(key in run["metrics"] for run in runs)
    ]


def all_lengths(runs):
    return sorted({n for run in runs for n in run["extrapolation"]["lengths"]}, key=int)


def lengths(runs):
    def of(run, length, key):
        row = run["extrapolation"]["lengths"].get(length)  # refused beyond a table's end
        return None if row is None else records.number(row[key])

    def column(title, form, length, key):
        return Column(title, form, functools.partial(of, length=length, key=key))

    every = all_lengths(runs)
    ends = (("tail PPL", ".2f", "tail_ppl"), ("bits/byte", ".3f", "bits_per_byte"), ("ratio", ".3f", "ratio"))
    last = [column(title, form, every[-1], key) for title, form, key in ends]
    return [*(column(f"PPL {n}", ".2f", n, "ppl") for n in every), *last]


def answers(runs):
    """Of a probe: the share of right answers by length."""

    def of(run, length):
        row = run["probe"]["lengths"].get(length)
        return None if row is None else 100 * row["accuracy"]

    every = sorted({n for run in runs for n in run["probe"]["lengths"]}, key=int)
    return [Column(f"right % {n}", ".1f", functools.partial(of, length=n)) for n in every]


def places(runs):
    """[(resolution, offset)] that some run was evaluated at, in order."""
    rows = [row for run in runs for row in run["resolutions"]["rows"]]
    return list(dict.fromkeys((records.size(row), tuple(row["offset"])) for row in rows))


def at_place(run, place):
    for row in run["resolutions"]["rows"]:
        if (records.size(row), tuple(row["offset"])) == place:
            return 100 * row["accuracy"]
    return None


def resolutions(runs, moved):
    """Top-1 by resolution, or with `moved` at every offset that is not zero."""
    columns = []
    for place in places(runs):
        pixels, offset = place
        if any(offset) == moved:
            shift = f"{offset[0]:g}" if len(set(offset)) == 1 else "×".join(f"{o:g}" for o in offset)
            title = f"{pixels} px, +{shift}" if moved else f"top-1 % {pixels} px"
            columns.append(Column(title, ".2f", functools.partial(at_place, place=place)))
    return columns


def cell(values, form, sign=""):
    return "–" if None in values else shown(values, form, sign)


def label(row):
    name, rate = row
    return name if rate is None else f"{name} lr={rate:g}"


def table(rows, columns):
    yield ["encoding", "seeds", "parameters", *(column.title for column in columns)]
    for row, seeds in rows.items():
        same = list(seeds.values())
        cells = [cell([c.of(run) for run in same], c.form) for c in columns]
        yield [label(row), str(len(same)), f"{same[0]['parameters']['total']:,}", *cells]


def against(row, rows):
    """The rows that a row is compared with: the one without rotated values, or else the rope baseline at its rate; and
    the control of equal parameters."""
    name, rate = row

    def find(wanted):
        same = [other for other in rows if other[0] == wanted]
        at_rate = [other for other in same if other[1] == rate]
        return at_rate or (same if len(same) == 1 else [])

    stem = name.removesuffix("_qkv")
    names = ((f"{stem}_qk", stem) if stem != name else ()) + BASELINES
    base = next(filter(None, map(find, names)), [])
    return [other for other in base + find(CONTROL) if other != row]


def differences(rows, columns):
    """Rows [encoding, against, pairs, a {seed: difference} a column] of all that can be compared."""
    for row, seeds in rows.items():
        for other in against(row, rows):
            common = sorted(seeds.keys() & rows[other].keys())
            found = []
            for c in columns:
                ours, base = ({s: runs[s] for s in common} for runs in (seeds, rows[other]))
                values = [{s: c.of(run) for s, run in side.items()} for side in (ours, base)]
                found.append({} if None in [*values[0].values(), *values[1].values()] else paired(*values))
            if common:
                yield row, other, len(common), found


def differences_table(rows, columns):
    """[] without two pairs anywhere."""
    head = ["encoding", "minus", "pairs", *(c.title for c in columns)]
    body = [
        [
            label(row),
            label(other),
            str(n),
            *(cell(list(d.values()), c.form, "+") for c, d in zip(columns, found, strict=True)),
        ]
        for row, other, n, found in differences(rows, columns)
        if n > 1
    ]
    return [[head, *body]] if body else []


HEAD = ["encoding", "parameters", "metric", "seeds", "mean", "interval", "least", "most"]
HEAD += ["minus", "pairs", "difference", "difference interval"]


def csv_rows(rows, columns):
    """One row a figure, and one more for every row that it is compared with."""
    yield HEAD
    for row, seeds in rows.items():
        same = list(seeds.values())
        compared = [d for d in differences(rows, columns) if d[0] == row] or [(row, None, 0, [{}] * len(columns))]
        for k, c in enumerate(columns):
            values = [c.of(run) for run in same]
            if None in values:
                continue
            mean = [label(row), same[0]["parameters"]["total"], c.title, len(values), *interval(values)]
            for _, other, _, found in compared:
                gap = list(found[k].values())
                tail = [label(other), len(gap), *interval(gap)] if gap and other else [""] * 4
                yield [*mean, min(values), max(values), *tail]


def section(name, runs):
    rows = records.by_row(runs)
    blocks: list[Any] = [records.scale(runs[0])]
    text = all("extrapolation" in run for run in runs)
    pixels, probe = (all(key in run for run in runs) for key in ("resolutions", "probe"))
    main = lengths(runs) if text else answers(runs) if probe else metrics(runs)
    tables, plots = [main], {}
    if text:
        scored = {f"{row['scored']:,}" for run in runs for row in run["extrapolation"]["lengths"].values()}
        blocks.append(
            f"The same {' or '.join(sorted(scored))} tokens are scored at every length, in windows inside held-out "
            f"documents; bits/byte and the tail (the last {runs[0]['config']['data']['length']} positions) are at "
            f"{all_lengths(runs)[-1]}; ratio: its PPL over that at the shortest length."
        )
        plots[name] = lambda path: extrapolate.plot(first_seeds(rows), path)
    if pixels:
        tables += filter(None, (resolutions(runs, moved=False), resolutions(runs, moved=True)))
        plots[name] = lambda path: plot_resolutions(rows, path)
    if looked := attention.found(rows, label):
        plots[f"{name}-attention"] = lambda path: attention.plot(looked, path)
    for columns in tables:
        blocks.append(list(table(rows, columns)))
    seeds = {len(found) for found in rows.values()}
    if seeds == {1}:
        blocks.append("Every row is a single run: differences of this size can be chance.")
    else:
        blocks.append("±: half of the 95 % Student-t interval of the mean over the seeds. One seed: a single run.")
    every = [column for columns in tables for column in columns]
    for columns in tables:
        if found := differences_table(rows, columns):
            blocks += [
                GAPS,
                *found,
            ]
    return Section(name, name, blocks, list(csv_rows(rows, every)), plots)


def first_seeds(rows):
    return {label(row): seeds[min(seeds)]["extrapolation"] for row, seeds in rows.items()}


def plot_resolutions(rows, path):
    """Top-1 against the size of the image, without offset; bars: 95 % intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    trained = set()
    for row, seeds in rows.items():
        trained |= {str(run["config"]["data"]["image_size"]) for run in seeds.values()}
        found = [p for p in places(seeds.values()) if not any(p[1])]
        scores = [interval([at_place(run, p) for run in seeds.values()]) for p in found]
        halves = [half or 0.0 for _, half in scores]
        axis.errorbar(
            [p[0] for p in found], [mean for mean, _ in scores], halves, fmt="o-", capsize=3, label=label(row)
        )
    axis.set(xlabel=f"pixels a side, zero-shot (trained at {', '.join(sorted(trained))})", ylabel="top-1 %")
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def grouped(found):
    """{name: records} of one group and scale; what tells several scales apart is in the names."""
    groups = defaultdict(lambda: defaultdict(list))
    for record in found:
        groups[records.group(record)][records.scale(record)].append(record)
    named = {}
    for name, scales in groups.items():
        parts = {scale: re.split("[:;,] ", scale.rstrip(".")) for scale in scales}
        for scale, runs in scales.items():
            own = [part for part in parts[scale] if not all(part in other for other in parts.values())]
            named["-".join([name, *own]).replace(" ", "_")] = runs
    return dict(sorted(named.items()))


def sections(found):
    return [section(name, runs) for name, runs in grouped(found).items()]
