"""Records of runs (result.json): read, named, told apart, and what stands in them."""

import json
import math
import sys
from collections import defaultdict
from pathlib import Path

from flax import traverse_util

from jojax import config, result, writer

NEEDED = ("config", "config_name", "overrides", "seed", "metrics", "parameters", "steps")
OWN = ("encoding", "seed", "lr")  # arguments in which rows of one table may differ
# where the data lie, how they are cut into micro-batches, what a preset is called: the same run
SAME = (*result.FREE, "seed", "encoding.preset", "data.path", "data.train_path", "data.valid_path", "optim.accumulate")
SHOWN = ("eval.lengths", "eval.document_tokens", "eval.resolutions", "eval.offsets", "eval.diagnostics")  # in tables
IMAGES = ("folder", "tfds")  # of one name: the same data
HELD_OUT = {"val": "validation", "valid": "validation"}  # as folders have it: as TFDS has it


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


def group(record):
    """'length_extrapolation-size=novels': the config file, and all that was changed but the encoding, the argument lr,
    the seed, and what leaves the run the same."""
    path, arg = config.split_spec(record["config_name"])
    rest = [a for a in (arg or "").split(",") if a and a.partition("=")[0] not in OWN]
    changed = {k: v for k, v in sorted(record["overrides"].items()) if k.partition(".")[0] not in OWN}
    told = [f"{k}={v}" for k, v in changed.items() if k.startswith(SHOWN) or not k.startswith(SAME)]
    return "-".join([path.stem, *rest, *told]).replace("/", "_")


def encoding(record):
    """The preset, or the module's name; with the options that were given beside it."""
    options = record["config"]["encoding"]
    given = {k.partition(".")[2]: v for k, v in record["overrides"].items() if k.startswith("encoding.")}
    if "preset" not in options:
        given = {k: v for k, v in options.items() if k != "name"}
    if record["config"]["model"].get("mixer") == "recurrence":
        return "recurrence"
    return " ".join([options.get("preset", options["name"]), *(f"{k}={v}" for k, v in sorted(given.items()))])


def scale(record):
    c = record["config"]
    m = c["model"]
    size = f"{m['kind']} width {m['width']}, {m['depth']} blocks, {m['heads']} heads"
    data = c["data"]["source"]
    if data in IMAGES and c["data"]["name"]:
        data = c["data"]["name"]
    elif data in ("text", "tokens", *IMAGES):
        data = Path(c["data"]["train_path" if data == "text" else "path"]).name
    trained = f"{record['steps']:,} steps of batch {c['batch_size']}"
    unit = f", length {c['data']['length']}, vocabulary {c['data']['vocab']}" if m["kind"] == "lm" else ""
    return f"Scale: {size}; {data}{unit}; {trained}."


def by_row(runs):
    """{(encoding, rate or None): {seed: run}}; runs of a seed are the same run. The rate where the table has several
    of them."""

    def rate(run):
        return run["config"].get("optim", {}).get("lr")

    several = len({rate(run) for run in runs}) > 1
    rows = defaultdict(dict)
    for run in runs:
        rows[encoding(run), rate(run) if several else None][run["seed"]] = run
    return dict(sorted(rows.items(), key=lambda item: (item[0][0], item[0][1] or 0)))


def identity(settings):
    """What makes two runs of a config differ in more than the seed, as a key. settings: a config, or a record's."""
    flat = traverse_util.flatten_dict(json.loads(json.dumps(writer.plain(settings))), sep=".")
    flat["init_from"] = bool(flat.get("init_from"))
    if flat["data.source"] in IMAGES and flat["data.name"]:
        flat["data.source"] = IMAGES
        flat["data.valid_split"] = HELD_OUT.get(flat["data.valid_split"], flat["data.valid_split"])
    return json.dumps({k: v for k, v in flat.items() if not k.startswith(SAME)}, sort_keys=True)


def number(value):
    return math.inf if value is None else value  # JSON has no infinity


def evaluations(record, kind):
    """The evaluations of a kind, the run's own first; not those with other options of the encoding, of the average of
    the parameters, or of a step before the last."""

    def own(protocol):
        return not {"encoding", "step"} & protocol.keys() and protocol.get("parameters") != "average"

    keys = sorted(k for k in record if k == kind or k.startswith(f"{kind}-"))
    return [record[k] for k in keys if own(record[k]["protocol"])]


def figure(record, metric):
    """A metric of results/paper.csv in a record, in the published unit (accuracies in %); None: it is not there.

    perplexity@N, ratio@N/M (of perplexities): of windows of N tokens; accuracy@N: at N² pixels, without offset."""
    name, _, at = metric.partition("@")
    if name == "parameters":
        return record["parameters"]["total"]
    if name in ("perplexity", "ratio") and at:
        wanted = at.split("/")
        for scores in evaluations(record, "extrapolation"):
            if all(n in scores["lengths"] for n in wanted):
                ppl = [number(scores["lengths"][n]["ppl"]) for n in wanted]
                return ppl[0] if name == "perplexity" else ppl[0] / ppl[1]
        return None
    times = 100 if name in ("accuracy", "top5") else 1
    if at:
        for scores in evaluations(record, "resolutions"):
            for row in scores["rows"]:
                if size(row) == at and not any(row["offset"]) and name in row:
                    return times * row[name]
        return None
    return times * number(record["metrics"][name]) if name in record["metrics"] else None


def size(row):
    """'32' or '32×48', of a row of an evaluation at other resolutions."""
    sides = row["resolution"]
    return str(sides) if isinstance(sides, int) else "×".join(map(str, sides))
