"""The papers' figures (results/paper.csv) beside ours, with verdicts: a section a paper."""

import csv
import functools
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from jojax import config
from scripts.tables import records
from scripts.tables.page import Link, Section
from scripts.tables.runs import grouped
from scripts.tables.stats import NONE, NOT_PLANNED, SMALL, VERDICTS, WANTED, interval, paired, shown, verdict

REPOSITORY = Path(__file__).resolve().parent.parent.parent
COLUMNS = (
    "paper",
    "version",
    "table",
    "where",
    "setting",
    "metric",
    "value",
    "unit",
    "better",
    "config",
    "against",
    "control",
    "small",
    "no_config",
    "differs",
    "doubts",
)


def read(path):
    """Published figures, in the file's order."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@functools.cache
def key(spec):
    return records.identity(config.load(f"{REPOSITORY}/{spec}"))


@functools.cache
def margins(path):
    """What a config file declares: {metric: in the published unit, or as '5%' of the published value}."""
    return config.module(f"{REPOSITORY}/{path}").MARGINS


def margin(row):
    """The declared one in the unit of the value; of accuracy@384 that of accuracy, of 'gain accuracy' that of gain."""
    name = row["metric"].partition("@")[0].partition(".")[0].partition(" ")[0]
    declared = margins(config.split_spec(row["config"])[0])[name]
    return abs(float(row["value"])) * float(declared[:-1]) / 100 if isinstance(declared, str) else declared


class Runs:
    """Records by what was run. full(spec) -> {seed: record} of the very config, nothing overridden that touches
    numbers; small(specs) -> the table of the first scaled-down config that has such a run, or None."""

    def __init__(self, found):
        self.tables: dict[tuple[str, str], str] = {}
        for name, own in grouped(found).items():
            for record in own:
                self.tables.setdefault((records.group(record), records.encoding(record)), name)
        self.by_key = defaultdict(dict)
        for record in found:
            self.by_key[records.identity(record["config"])][record["seed"]] = record

    def full(self, spec):
        return self.by_key.get(key(spec), {}) if spec else {}

    def small(self, specs):
        for spec in specs.split():
            arguments = dict(a.partition("=")[::2] for a in (config.split_spec(spec)[1] or "").split(","))
            asked = records.group({"config_name": spec, "overrides": {}}), arguments.get("encoding", "")
            if asked in self.tables:
                return self.tables[asked]
        return None


def figures(runs, metric):
    """{seed: figure} of the records that have it."""
    found = {seed: records.figure(record, metric) for seed, record in sorted(runs.items())}
    return {seed: value for seed, value in found.items() if value is not None}


def compare(row, runs, published):
    """What we have to say about a row: ours, gaps, control {seed: …}, paper_gap, parameters, margin, verdict.

    published: {(paper, table, metric, config): value}, where the baseline's figure is looked up."""
    out: dict[str, Any] = dict(ours={}, gaps={}, control={}, paper_gap=None, parameters=None, margin=None, small=None)
    small = runs.small(row["small"])
    if not row["config"]:
        return out | {"small": small, "verdict": SMALL if small else NOT_PLANNED}
    sides = [runs.full(row[side]) for side in ("config", "against", "control")]
    gain, _, metric = row["metric"].rpartition(" ")
    own, base, control = (figures(side, metric) for side in sides)
    value = float(row["value"])
    out["gaps"], out["control"] = paired(own, base), paired(own, control)
    if gain:
        out["ours"], out["paper_gap"] = out["gaps"], value
    else:
        out["ours"] = own
        other = published.get((row["paper"], row["table"], row["metric"], row["against"]))
        out["paper_gap"] = None if other is None else value - other
    out["parameters"] = next((record["parameters"]["total"] for record in sides[0].values()), None)
    out["margin"] = margin(row)
    found = verdict(value, out["margin"], out["ours"], out["gaps"], out["paper_gap"] or 0.0)
    return out | ({"small": small, "verdict": SMALL} if found == NONE and small else {"verdict": found})


HEAD = ("setting", "metric", "paper", "ours", "seeds", "difference", "margin", "paper − baseline", "ours − baseline")
HEAD = (*HEAD, "ours − matched control", "parameters", "verdict", "notes")


def line(row, found, notes):
    """The cells of HEAD."""
    form = f".{max(2, len(row['value'].partition('.')[2]))}f"
    unit = f" {row['unit']}" if row["unit"] else ""
    gap, base, margin = found["paper_gap"], found["gaps"], found["margin"]
    ours = interval(found["ours"].values())[0] - float(row["value"]) if found["ours"] else None
    word = found["verdict"]
    return [
        row["setting"],
        row["metric"],
        row["value"] + unit,
        shown(found["ours"].values(), form),
        f"{len(found['ours'])}" if found["ours"] else "–",
        "–" if ours is None else f"{ours:+{form}}",
        "–" if margin is None else f"{margin:.3g}",
        "–" if gap is None else f"{gap:+{form}}",
        shown(base.values(), form, "+"),
        shown(found["control"].values(), form, "+"),
        "–" if found["parameters"] is None else f"{found['parameters']:,}",
        Link(word, found["small"]) if found["small"] else word,
        " ".join(notes) or "–",
    ]


def without_empty(rows):
    """Columns with nothing in them are left out, but for the verdict."""
    head, *body = rows
    kept = [k for k, name in enumerate(head) if name == "verdict" or any(row[k] != "–" for row in body)]
    return [[row[k] for k in kept] for row in rows]


def table(pairs):
    """The blocks of a published table: where it stands, how our setting differs, its rows, the doubts."""
    numbers: dict[str, str] = {}

    def note(text):
        return numbers.setdefault(text, f"[{len(numbers) + 1}]")

    lines = [list(HEAD)]
    for row, found in pairs:
        texts = [row["no_config"], row["doubts"], row["differs"] and f"our setting: {row['differs']}"]
        lines.append(line(row, found, [note(text) for text in texts if text]))
    sources = dict.fromkeys(f"{row['where']} ({row['version']})" for row, _ in pairs)
    files = dict.fromkeys(f"`{config.split_spec(row['config'])[0]}`" for row, _ in pairs if row["config"])
    source = f"Source: {'; '.join(sources)}." + (f" Config: {', '.join(files)}." if files else "")
    told = [f"{number} {text}." for text, number in numbers.items()]
    return [source, without_empty(lines), " ".join(told)]


ABOUT = (
    f"Verdicts are made from full-scale runs of a row's own config, {WANTED} seeds wanted and two at least, by the "
    "margin that its config file declares; ± is half of a 95 % Student-t interval of the mean over the seeds, "
    "differences to the baseline are paired by seed. No interval is corrected for the number of rows. Our small runs "
    "stand in tables of their own, to which the verdict 'scaled down' leads. Rules: README.md here."
)


def summary(tables):
    words = [word for word in VERDICTS if any(f["verdict"] == word for pairs in tables.values() for _, f in pairs)]
    yield ["table", "figures", *words]
    for name, pairs in tables.items():
        counts = Counter(found["verdict"] for _, found in pairs)
        yield [name, str(len(pairs)), *(str(counts[word]) if counts[word] else "–" for word in words)]


CSV_HEAD = [*COLUMNS[:8], "config", "ours", "interval", "seeds", "difference", "margin", "paper minus baseline"]
CSV_HEAD += [f"{what}{of}" for of in ("baseline", "control") for what in ("ours minus ", "interval to ", "pairs with ")]
CSV_HEAD += ["parameters", "verdict", "scaled-down table"]


def csv_row(row, found):
    def stats(values):
        return [*interval(values.values()), len(values)] if values else [None, None, 0]

    mean, half, seeds = stats(found["ours"])
    gap = None if mean is None else mean - float(row["value"])
    middle = [mean, half, seeds, gap, found["margin"], found["paper_gap"]]
    ends = [found["parameters"], found["verdict"], found["small"]]
    named = [row[name] for name in (*COLUMNS[:8], "config")]
    return [*named, *middle, *stats(found["gaps"]), *stats(found["control"]), *ends]


def section(paper, rows, runs):
    published = {(r["paper"], r["table"], r["metric"], r["config"]): float(r["value"]) for r in rows if r["config"]}
    tables = defaultdict(list)
    for row in rows:
        tables[row["table"]].append((row, compare(row, runs, published)))
    blocks: list[Any] = [ABOUT, list(summary(tables))]
    for name, pairs in tables.items():
        blocks += [f"### {name}", *table(pairs)]
    lines = [CSV_HEAD, *(csv_row(*pair) for pairs in tables.values() for pair in pairs)]
    return Section(f"papers-{paper}", f"Published figures: {paper}", blocks, lines)


def sections(rows, found):
    """A section a paper, in the order of the list."""
    runs = Runs(found)
    papers = defaultdict(list)
    for row in rows:
        papers[row["paper"]].append(row)
    return [section(paper, own, runs) for paper, own in papers.items()]
