"""Verdicts by their rules, each with what must not have it; published figures; the page."""

import json
import math
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jojax import config, writer
from scripts import report
from scripts.tables import page, papers, records, runs, stats

ROOT = Path(__file__).resolve().parent.parent
FIGURES = papers.read(ROOT / "results" / "paper.csv")


# ------------------------------------------------------------------------------ statistics
def test_intervals():
    assert stats.interval([3.0]) == (3.0, None)
    mean, half = stats.interval([1.0, 2.0, 4.0])
    assert (mean, half) == pytest.approx((7 / 3, 4.302653 * np.std([1, 2, 4], ddof=1) / 3**0.5), rel=1e-6)
    assert stats.interval([1.0, math.inf])[0] == math.inf and math.isnan(stats.interval([1.0, math.inf])[1])
    assert stats.shown([1.0, 2.0, 4.0], ".2f", "+") == "+2.33 ± 3.79" and stats.shown([1.0, math.inf], ".2f") == "inf"
    assert stats.paired({0: 3.0, 1: 5.0, 2: 9.0}, {1: 4.0, 2: 4.0, 7: 0.0}) == {1: 1.0, 2: 5.0}


def seeds(*values):
    return dict(enumerate(map(float, values)))


UP, DOWN, NOISE = seeds(1.9, 2.0, 2.1), seeds(-1.9, -2.0, -2.1), seeds(-5, 2, 6)


@pytest.mark.parametrize(
    ("ours", "gaps", "published", "word"),
    [
        (seeds(), {}, 2.0, stats.NONE),
        (seeds(80.0), {}, 0.0, stats.SINGLE),  # exactly the paper's, once
        (seeds(80.0), seeds(2.0), 2.0, stats.SINGLE),
        (seeds(79.9, 80.0, 80.1), {}, 0.0, stats.REPRODUCED),
        (seeds(79.9, 80.0, 80.1), NOISE, 2.0, stats.REPRODUCED),  # the paper claims no significance either
        (seeds(79.9, 80.0, 80.1), DOWN, 2.0, stats.NOT),  # its figure, but the difference turned round
        (seeds(79.9, 80.0, 80.1), UP, -2.0, stats.NOT),
        (seeds(78.0, 80.0, 82.0), {}, 0.0, stats.OPEN),  # the mean fits, the interval is too wide
        (seeds(78.0, 80.0, 82.0), UP, 2.0, stats.OPEN),
        (seeds(69.9, 70.0, 70.1), UP, 2.0, stats.DIRECTION),
        (seeds(69.9, 70.0, 70.1), DOWN, -2.0, stats.DIRECTION),
        (seeds(69.9, 70.0, 70.1), NOISE, 2.0, stats.NOT),  # no significant direction
        (seeds(69.9, 70.0, 70.1), seeds(2.0), 2.0, stats.NOT),  # one pair is no direction
        (seeds(69.9, 70.0, 70.1), UP, 0.0, stats.NOT),  # no published difference
        (seeds(69.9, 70.0, 70.1), DOWN, 2.0, stats.NOT),
        (seeds(77.0, 78.5, 81.0), {}, 0.0, stats.OPEN),  # the mean lies outside, the interval does not
        (seeds(80.0, 80.0, math.inf), {}, 0.0, stats.NOT),  # one diverged
    ],
)
def test_verdicts(ours, gaps, published, word):
    assert stats.verdict(80.0, 1.0, ours, gaps, published) == word


VALUES = st.lists(st.floats(60, 100), min_size=2, max_size=6)
GAPS = st.lists(st.floats(-5, 5), max_size=6)


@given(VALUES, GAPS, st.floats(-3, 3), st.floats(0.1, 5), st.floats(-20, 20))
def test_verdicts_keep_their_promises(values, gaps, published, margin, shift):
    word = stats.verdict(80.0, margin, seeds(*values), seeds(*gaps), published)
    mean, half = stats.interval(values)
    sign = stats.direction(seeds(*gaps), published)
    if word == stats.REPRODUCED:
        assert abs(mean - 80) + half <= margin and sign >= 0
        assert stats.verdict(80.0, 2 * margin, seeds(*values), seeds(*gaps), published) == word
    if word == stats.DIRECTION:
        assert abs(mean - 80) > margin and sign > 0
    if word == stats.NOT:
        assert abs(mean - 80) - half > margin or sign < 0
    moved = seeds(*(v + shift for v in values))  # the paper's figure and ours together: nothing changes
    if min(abs(abs(mean - 80) + k * half - margin) for k in (-1, 0, 1)) > 1e-6:
        assert stats.verdict(80.0 + shift, margin, moved, seeds(*gaps), published) == word
    mirrored = stats.verdict(-80.0, margin, seeds(*(-v for v in values)), seeds(*(-g for g in gaps)), -published)
    assert mirrored == word
    assert stats.verdict(80.0, margin, seeds(values[0]), seeds(*gaps), published) == stats.SINGLE


# ---------------------------------------------------------------------------- published figures
def test_every_published_figure_is_complete():
    assert tuple(FIGURES[0]) == papers.COLUMNS
    names = [tuple(row[key] for key in ("paper", "table", "where", "setting", "metric")) for row in FIGURES]
    assert len(set(names)) == len(names) > 1700
    for row in FIGURES:
        assert all(row[key] for key in ("paper", "version", "table", "where", "setting", "metric", "value")), row
        assert bool(row["config"]) != bool(row["no_config"]), row  # one, or why there is none
        assert not row["config"] or math.isfinite(float(row["value"])), row
        assert row["better"] in ("higher", "lower", ""), row


def test_configs_of_published_figures_load_and_declare_margins():
    for row in FIGURES:
        for spec in row["small"].split():
            config.load(f"{ROOT}/{spec}")
            assert spec.partition(",")[0] not in row["config"], row
        if not row["config"]:
            continue
        for column in ("config", "against", "control"):
            assert not row[column] or papers.key(row[column]), row
        assert row["config"] != row["against"]
        declared = papers.margin(row)
        assert 0 < declared < 0.2 * abs(float(row["value"])) or "gain" in row["metric"], row


def test_every_table_of_the_three_papers_has_its_rows():
    tables = {
        (row["paper"], row["table"]) for row in FIGURES if row["config"] or row["table"] in ("Table 2", "Table 3")
    }
    wanted = {"joformer": (1, 2, 3, 4), "comrope": (1, 2, 3, 4, 10), "grape": (1, 2)}
    assert {(paper, f"Table {n}") for paper, numbers in wanted.items() for n in numbers} <= tables
    coco = [row for row in FIGURES if "COCO" in row["where"] and row["paper"] == "comrope"]
    assert len(coco) == 20 and all("detection framework" in row["no_config"] for row in coco)


SPEC = "configs/comrope_vitb.py:encoding={},sigma=1"
ROW = dict(paper="p", table="t", setting="s", metric="accuracy@224", value="65.49", config=SPEC.format("comrope_ld"))
ROW |= dict(against=SPEC.format("rope_unit10k"), control="", no_config="", unit="%", where="w", version="v", doubts="d")
ROW |= dict(small="configs/scaled_down.py:table=resolutions,encoding=comrope_ld", differs="", better="higher")
BASE = ROW | {"config": ROW["against"], "against": "", "value": "63.09", "setting": "b"}


def run(spec, seed, accuracy, **overrides):
    """The record of a run of a config, as training writes it."""
    made = config.apply_overrides(config.load(f"{ROOT}/{spec}"), overrides | {"seed": seed})
    rows = [{"resolution": r, "offset": [o, o], "accuracy": accuracy - o} for r, o in ((224, 0.1), (224, 0.0))]
    name, settings = f"{spec},seed={seed}", json.loads(json.dumps(writer.plain(made)))
    out = {"config_name": name, "config": settings, "overrides": overrides, "seed": seed, "metrics": {"loss": 1.0}}
    evaluated = {"protocol": {}, "rows": rows}
    return out | {"state": "finished", "parameters": {"total": 86}, "steps": 3, "resolutions": evaluated}


def compared(*found):
    published = {(r["paper"], r["table"], r["metric"], r["config"]): float(r["value"]) for r in (ROW, BASE)}
    return papers.compare(ROW, papers.Runs(found), published)


LD, UNIT = SPEC.format("comrope_ld"), SPEC.format("rope_unit10k")


def test_runs_of_the_very_config_count():
    """Wherever the data lie and however a step is cut; not with another recipe, nor a scaled-down run."""
    ours = [run(LD, seed, 0.65 + seed / 1000, **{"data.path": "elsewhere", "optim.accumulate": 4}) for seed in range(3)]
    base = [run(UNIT, seed, 0.62 + seed / 1000) for seed in range(1, 4)]
    found = compared(*ours, *base)
    assert found["ours"] == pytest.approx({0: 65.0, 1: 65.1, 2: 65.2}) and found["verdict"] == stats.REPRODUCED
    assert found["gaps"] == pytest.approx({1: 3.0, 2: 3.0}) and found["paper_gap"] == pytest.approx(2.4)
    assert found["margin"] == 1.0 and found["parameters"] == 86
    assert compared(*ours[:1])["verdict"] == stats.SINGLE
    changed = [run(LD, seed, 0.65, **{"optim.lr": 2e-3}) for seed in range(3)]
    assert compared(*changed)["verdict"] == compared()["verdict"] == stats.NONE
    small = run("configs/scaled_down.py:table=resolutions,encoding=comrope_ld", 0, 0.655)
    found = compared(small, *changed)
    assert found["verdict"] == stats.SMALL and found["small"] == "scaled_down-table=resolutions" and not found["ours"]
    other = run("configs/scaled_down.py:table=resolutions,encoding=liere", 0, 0.655)
    assert compared(other)["verdict"] == stats.NONE
    assert compared(small, *ours)["verdict"] == stats.REPRODUCED


def test_where_data_lie_and_how_a_run_is_cut_name_no_table():
    """The same run on two machines stands in one table; what its evaluations ask for tells tables apart."""
    machine = {"data.path": "/mnt/a/tfds", "checkpoint.keep": 3, "mesh.fsdp": 8, "eval.batch_size": 64}
    ours = [run(LD, 0, 0.65, **machine), run(LD, 1, 0.66), run(LD, 2, 0.66, **{"eval.resolutions": (224,)})]
    names = [records.group(made) for made in ours]
    assert names[0] == names[1] and "mnt" not in names[0] and names[2] == f"{names[0]}-eval.resolutions=(224,)"
    assert records.scale(ours[0]) == records.scale(ours[1]) and "; imagenet2012; " in records.scale(ours[0])
    own = [run("configs/quickstart_vit.py", 0, 0.5, **{"data.source": "folder", "data.path": p}) for p in ("a/x", "y")]
    assert ["; x; " in records.scale(own[0]), "; y; " in records.scale(own[1])] == [True, True]


def test_class_folders_and_tfds_of_one_name_are_the_same_images():
    tfds = {"data.source": "tfds", "data.valid_split": "validation"}
    assert compared(*(run(LD, seed, 0.65, **tfds) for seed in range(3)))["verdict"] == stats.REPRODUCED
    for other in ({"data.valid_split": "train"}, {"data.name": "imagenet_v2"}, {"data.train_split": "train[:50%]"}):
        assert compared(*(run(LD, seed, 0.65, **tfds | other) for seed in range(3)))["verdict"] == stats.NONE
    text = config.load(f"{ROOT}/configs/wikipedia_lm.py")
    assert records.identity(text) != records.identity(config.apply_overrides(text, {"data.source": "text"}))


def test_a_verdict_leads_to_a_table_that_is_made():
    """Also where a group of runs has two scales, whose tables have longer names."""
    small = run("configs/scaled_down.py:table=resolutions,encoding=comrope_ld", 0, 0.655)
    found = [small, small | {"steps": 7, "seed": 1}]
    assert compared(*found)["small"] in [section.name for section in runs.sections(found)]


def test_rows_without_a_config():
    row = ROW | {"config": "", "no_config": "needs detection"}
    assert papers.compare(row, papers.Runs([]), {})["verdict"] == stats.NOT_PLANNED
    small = papers.Runs([run("configs/scaled_down.py:table=resolutions,encoding=comrope_ld", 0, 0.6)])
    assert papers.compare(row, small, {})["verdict"] == stats.SMALL


def test_a_gain_is_the_paired_difference():
    runs = papers.Runs([run(LD, s, 0.65) for s in range(3)] + [run(UNIT, s, 0.62) for s in range(3)])
    row = ROW | {"metric": "gain accuracy@224", "value": "3.0"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(papers, "margin", lambda row: 0.5)
        found = papers.compare(row, runs, {})
    assert found["ours"] == pytest.approx({0: 3.0, 1: 3.0, 2: 3.0}) and found["verdict"] == stats.REPRODUCED


def test_figures_of_records():
    lengths = {n: {"ppl": p} for n, p in (("512", 20.0), ("4096", 50.0), ("8192", None))}
    changed, averaged, early = (
        {"protocol": protocol, "lengths": {"16384": {"ppl": 7.0}}}
        for protocol in ({"encoding": {"base": 5e5}}, {"parameters": "average"}, {"step": 100})
    )
    made = {"metrics": {"accuracy": 0.5, "perplexity": 3.0}, "parameters": {"total": 9}}
    made |= {"extrapolation": {"protocol": {}, "lengths": lengths}, "extrapolation-base=500000.0": changed}
    made |= {"extrapolation-ema": averaged, "extrapolation-step100": early}
    expected = {"accuracy": 50, "perplexity": 3, "perplexity@512": 20, "ratio@4096/512": 2.5, "parameters": 9}
    expected |= {"perplexity@8192": math.inf, "perplexity@16384": None, "lm_eval.piqa": None, "accuracy@224": None}
    assert {metric: records.figure(made, metric) for metric in expected} == expected


def test_runs_of_several_scales_are_never_in_one_table():
    path = ROOT / "results" / "runs" / "quickstart-encoding=rope.json"
    (made,) = records.load([path])
    longer = made | {"steps": 2 * made["steps"], "seed": made["seed"] + 1}
    assert [s.name for s in runs.sections([made, made | {"seed": 7}])] == ["quickstart"]
    assert [s.name for s in runs.sections([made, longer])] == [
        f"quickstart-{run['steps']:,}_steps_of_batch_16" for run in (made, longer)
    ]


# --------------------------------------------------------------------------------------- the page
class Balanced(HTMLParser):
    """Every tag is closed in order; ids, links, what it asks for from elsewhere."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.asked, self.links = [], [], [], []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.asked += [attrs[key] for key in ("src", "srcset") if key in attrs and not attrs[key].startswith("data:")]
        self.links += [attrs["href"]] if "href" in attrs else []
        if tag not in ("meta", "img", "br", "link"):
            self.open.append(tag)
        assert tag not in ("script", "link")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parsed(text):
    parser = Balanced()
    parser.feed(text)
    parser.close()
    assert not parser.open and not parser.asked and len(set(parser.ids)) == len(parser.ids)
    assert {link[1:] for link in parser.links if link.startswith("#")} <= set(parser.ids)
    return parser


def test_committed_results_are_what_the_records_say(capsys):
    report.check(ROOT / "results", ROOT / "results" / "plots")
    assert "agree with their records" in capsys.readouterr().out
    assert {"papers-joformer", "papers-comrope", "papers-grape"} <= set(
        parsed((ROOT / "results" / "index.html").read_text()).ids
    )
    for paper in ("joformer", "comrope", "grape"):
        rows = papers.read(ROOT / "results" / f"papers-{paper}.csv")
        assert rows and {row["verdict"] for row in rows} <= set(stats.VERDICTS)
        assert all(row["verdict"] not in (stats.REPRODUCED, stats.DIRECTION) or int(row["seeds"]) > 1 for row in rows)


def test_the_page_escapes_and_folds(tmp_path):
    rows = [["a", "b"], ["<script>", page.Link("scaled & down", "x=1")], ["`code` & more", "–"]]
    made = page.Section("p", "P < Q", ["text `a<b`", "### T & U", rows, "### V", rows], [["a"]], {"x": None})
    other = page.Section("x=1", "x", ["none"], [["a"]])
    (tmp_path / "x.png").write_bytes(b"bytes")
    (tmp_path / "y.png").write_bytes(b"other")
    text = page.page([made, other], tmp_path)
    parsed(text)
    assert "<script>" not in text and "&lt;script&gt;" in text and '<a href="#x=1">scaled &amp; down</a>' in text
    assert text.count("<details>") == 2 and "<code>code</code> &amp; more" in text and "Other figures" in text
    assert "data:image/png;base64,Ynl0ZXM=" in text and text == page.page([made, other], tmp_path)
    shown = page.markdown(made)
    assert "[scaled & down](x=1.md)" in shown and shown.startswith("## P < Q\n\ntext `a<b`\n\n### T & U\n\n| a | b |")
    with pytest.raises(AssertionError):
        parsed(text.replace("</details>", "", 1))
    with pytest.raises(AssertionError):
        parsed(text.replace("data:image", "https://image", 1))
