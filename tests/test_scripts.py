"""The report: tables from records alone."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from jojax import extrapolate
from scripts import report
from scripts.tables import attention, papers, records

ROOT = Path(__file__).resolve().parent.parent
MODEL = {"kind": "lm", "width": 8, "depth": 2, "heads": 4}


def record(encoding, seed, ppl, state="finished", **changes):
    spec = f"configs/novel.py:size=small,encoding={encoding},seed={seed}"
    lengths = {
        n: {"ppl": ppl * k, "tail_ppl": ppl + k, "bits_per_byte": k / 8, "ratio": float(k), "scored": 640}
        | {"loss": float(k), "tail_loss": k + 1.0, "by_position": {"end": [8, 16], "loss": [2.0, k]}}
        for n, k in (("16", 1), ("64", 3))
    }
    if encoding == "learned":  # a table ends
        del lengths["64"]
    data = {"source": "text", "train_path": "data/novels.jsonl", "length": 16, "vocab": 9}
    own = {
        "config_name": spec,
        "seed": seed,
        "state": state,
        "overrides": {},
        "steps": 50,
        "parameters": {"total": 1234},
    }
    config = {"encoding": {"name": "rope", "preset": encoding}, "model": MODEL, "data": data, "batch_size": 3}
    own["metrics"] = {"loss": 2.0}
    scores = {"lengths": lengths, "protocol": {"training_length": 16}}
    return own | {"config": config, "extrapolation": scores} | changes


def image(encoding, accuracy):
    config = record(encoding, 0, 1)["config"] | {"model": MODEL | {"kind": "vit"}}
    metrics = {"accuracy": accuracy, "loss": 0.5}
    name = f"configs/pictures.py:encoding={encoding}"
    made = record(encoding, 0, 1, config_name=name, config=config, metrics=metrics)
    del made["extrapolation"]
    return made


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A repository's results folder. -> add(record)"""
    monkeypatch.setattr(report, "ROOT", tmp_path)
    runs = tmp_path / "results" / "runs"
    runs.mkdir(parents=True)
    (tmp_path / "results" / "README.md").write_text("by hand")

    def add(made):
        (runs / f"{len(list(runs.iterdir()))}.json").write_text(json.dumps(made))

    return add


def call(script, *args):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script.__name__, *args])
        return script.main()


def test_one_table_a_config_one_row_an_encoding(results, tmp_path, capsys):
    for made in (record("learned", 0, 9.0), record("rope", 0, 10.0), record("alibi", 0, 20.0), record("rope", 1, 12.0)):
        results(made)
    results(record("rope", 1, 12.0))  # the same run a second time is no third seed
    results(image("jo_fixed", 0.875))
    results(record("jo_fixed", 0, 1.0, state="running"))
    changed = record("rope", 0, 30.0, overrides={"optim.lr": 0.1})
    results(changed)
    call(report, "--results")
    text = (tmp_path / "results" / "novel-size=small.md").read_text()
    assert "| rope | 2 | 1,234 | 11.00 ± 12.71 | 33.00 ± 38.12 | 14.00 ± 12.71 | 0.375 ± 0.000 |" in text  # t = 12.706
    assert "| alibi | 1 | 1,234 | 20.00 | 60.00 | 23.00 | 0.375 | 3.000 |" in text and "jo_fixed" not in text
    assert "| learned | 1 | 1,234 | 9.00 | – | – | – | – |" in text
    assert "The same 640 tokens" in text and "50 steps of batch 3" in text and "One seed: a single run" in text
    pictures = (tmp_path / "results" / "pictures.md").read_text()
    assert "| jo_fixed | 1 | 1,234 | 87.50 | 0.5000 |" in pictures and "Every row is a single run" in pictures
    assert "30.00 | 90.00" in (tmp_path / "results" / "novel-size=small-optim.lr=0.1.md").read_text()
    assert {p.name for p in (tmp_path / "results" / "plots").iterdir()} == {
        "novel-size=small.png",
        "novel-size=small-optim.lr=0.1.png",
    }
    assert text in capsys.readouterr().out
    figures = papers.read(tmp_path / "results" / "novel-size=small.csv")
    assert figures[0]["encoding"] == "alibi" and figures[0]["mean"] == "20" and figures[0]["interval"] == ""
    tail = next(f for f in figures if (f["encoding"], f["metric"]) == ("rope", "tail PPL"))
    assert (tail["mean"], tail["interval"], tail["least"], tail["most"]) == ("14", "12.7062", "13", "15")


def test_rates_are_rows_and_differences_are_paired_by_seed(results, tmp_path):
    """Every encoding against rope at its rate, value rotation against the same without, on the seeds that both have."""
    for encoding, ppls in {"rope": (10, 12), "rope_qkv": (9, 10, 1), "alibi": (5, 8), "rope_matched": (11, 11)}.items():
        for seed, ppl in enumerate(ppls):
            for lr in (0.001, 0.003):
                made = record(encoding, seed, ppl * (1 + lr))
                made["config_name"] += f",lr={lr}"
                made["config"] = made["config"] | {"optim": {"lr": lr}}
                results(made)
    call(report, "--results")
    text = (tmp_path / "results" / "novel-size=small.md").read_text()
    assert "| rope lr=0.001 | 2 | 1,234 | 11.01 ± 12.72 |" in text and "| rope_qkv lr=0.003 | 3 |" in text
    assert "| alibi lr=0.001 | rope lr=0.001 | 2 | -4.50 ± 6.36 |" in text  # differences of -5 and -4, not of ±13
    assert "| rope_qkv lr=0.003 | rope lr=0.003 | 2 | -1.50 ± 6.37 |" in text  # the third seed has no partner
    assert "| alibi lr=0.001 | rope_matched lr=0.001 | 2 |" in text and "| rope lr=0.001 | rope lr" not in text


def test_resolutions_and_offsets_are_tables(results, tmp_path):
    for seed in (0, 1):
        made = image("rope_axial_qk", 0.5)
        places = ((16, 0.0), (32, 0.0), (16, 0.5), (32, 0.5))
        rows = [{"resolution": r, "offset": [o, o], "accuracy": (r - o + seed) / 100} for r, o in places]
        made |= {"seed": seed, "resolutions": {"rows": rows, "protocol": {}}}
        made["config"]["data"] = made["config"]["data"] | {"image_size": 32}
        results(made)
    call(report, "--results")
    text = (tmp_path / "results" / "pictures.md").read_text()
    assert "| encoding | seeds | parameters | top-1 % 16 px | top-1 % 32 px |" in text
    assert "| rope_axial_qk | 2 | 1,234 | 16.50 ± 6.35 | 32.50 ± 6.35 |" in text
    assert "| 16 px, +0.5 | 32 px, +0.5 |" in text and "| 1,234 | 16.00 ± 6.35 | 32.00 ± 6.35 |" in text
    assert (tmp_path / "results" / "plots" / "pictures.png").stat().st_size > 1000


def test_language_models_without_lengths_show_their_metrics(results, tmp_path):
    made = record("rope", 0, 1.0, metrics={"loss": 2.0, "perplexity": 7.389, "bits_per_byte": 1.5})
    del made["extrapolation"]
    results(made)
    call(report, "--results")
    assert "| rope | 1 | 1,234 | 7.39 | 1.500 | 2.0000 |" in (tmp_path / "results" / "novel-size=small.md").read_text()


def test_tables_that_are_not_what_the_records_say_are_told(results, tmp_path, capsys):
    results(record("rope", 0, 10.0))
    call(report, "--results")
    call(report, "--check")
    assert "3 files agree" in capsys.readouterr().out
    table = tmp_path / "results" / "novel-size=small.md"
    table.write_text(table.read_text().replace("10.00", "9.00"))
    with pytest.raises(SystemExit, match=r"not what its records say \(novel-size=small\.md\)"):
        call(report, "--check")
    call(report, "--results")
    (tmp_path / "results" / "claims.md").write_text("97 %")  # a table without records
    (tmp_path / "results" / "plots" / "novel-size=small.png").unlink()
    with pytest.raises(SystemExit, match=r"\(index\.html, novel-size=small\.png, claims\.md\)"):
        call(report, "--check")


def test_what_is_left_of_a_section_is_removed_and_nothing_else(results, tmp_path, capsys):
    folder = tmp_path / "results"
    results(looked("rope"))
    call(report, "--results")
    (record_file,) = (folder / "runs").iterdir()
    record_file.unlink()
    results(image("rope", 0.5))
    by_hand = {"README.md": "by hand", "claims.md": "## 97 %\n", "notes.csv": "a,b\n", "paper.csv": "paper,version\n"}
    for name, text in by_hand.items():
        (folder / name).write_text(text)
    (folder / "plots" / "journey.png").write_bytes(b"by draw_journey.py")
    with pytest.raises(SystemExit, match=r"novel-size=small\.csv.*: run with --results; .* claims\.md, notes\.csv$"):
        call(report, "--check")
    call(report, "--results")
    assert f"removed: {folder / 'novel-size=small.md'}" in capsys.readouterr().out
    assert {p.name for p in folder.glob("*.*")} == {*by_hand, "pictures.md", "pictures.csv", "index.html"}
    assert [p.name for p in (folder / "plots").iterdir()] == ["journey.png"]
    assert "novel-size" not in (folder / "index.html").read_text()


def test_no_finished_run_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="no finished run under runs/"):
        call(report)


def test_figures_of_the_readme_are_those_of_committed_records():
    """Rows of its tables, lines of its outputs; of a row over several seeds, each figure."""
    results, known, figures_of = ROOT / "results", set(), {}
    for table in results.glob("*.md"):
        known |= set(table.read_text().splitlines())
    for table in set(results.glob("*.csv")) - set(results.glob("paper*.csv")):
        for row in papers.read(table):
            of = figures_of.setdefault((row["encoding"], row["seeds"], f"{int(row['parameters']):,}"), set())
            stats = [float(row[key]) for key in ("mean", "interval", "least", "most") if row[key]]
            of |= {f"{value:.{digits}f}" for value in stats for digits in (2, 3, 4)}
    for path in (results / "runs").iterdir():
        made = json.loads(path.read_text())
        for scores in (value for key, value in made.items() if key.startswith("extrapolation")):
            known |= set(extrapolate.table(scores).splitlines())
        shown = "  ".join(f"{key} {value:.4g}" for key, value in made["metrics"].items())
        known.add(f"step {made['steps']}: valid {shown}")
    lines = (ROOT / "README.md").read_text().splitlines()
    figures = [line for line in lines if re.match(r"(\| \w+ \| \d| +\d+ +\d+\.\d|step \d+: valid)", line)]
    assert len(figures) >= 12
    for line in figures:
        name, *cells = line.strip("| ").split(" | ")
        of = figures_of.get((name, *cells[:2]), set()) if len(cells) > 2 else set()
        assert line in known or set(re.findall(r"\d+\.\d+", " ".join(cells[2:]))) <= of, line


def looked(encoding, seed=0):
    """A record with diagnostics, of two blocks and two heads."""
    block = {"entropy": [0.5, 0.7], "reach": [3.0, 4.0], "beyond": [0.1, 0.3]}
    block |= {"steps": {"mean": [[1.0, 0.1], [-1.0, 0.3]], "std": [[0.0, 0.2], [0.0, 0.4]]}}
    block |= {"values": {"distance": [0, 2], "alike": [[1.0, 0.5], [1.0, 0.9]]}}
    found = {"protocol": {"rows": 4, "length": 64, "training_length": 16}, "blocks": [block, {"entropy": [1.0, 1.0]}]}
    return record(encoding, seed, 9.0) | {
        "diagnostics": found if encoding != "none" else {"protocol": {}, "blocks": []}
    }


def test_what_attention_does_is_drawn_beside_the_table(results, tmp_path, capsys):
    for made in (looked("rope"), looked("alibi"), looked("none"), record("fox", 0, 8.0)):
        results(made)
    call(report, "--results")
    png = tmp_path / "results" / "plots" / "novel-size=small-attention.png"
    assert png.stat().st_size > 1000 and str(png) in capsys.readouterr().out
    assert "attention" in (tmp_path / "results" / "index.html").read_text()
    rows = {("rope", None): {0: looked("rope")}, ("fox", None): {0: record("fox", 0, 8.0)}}
    ((name, (blocks, _)),) = attention.found(rows, lambda row: row[0]).items()
    assert name == "rope" and attention.by_block(blocks, "entropy") == ([1, 2], [0.6, 1.0])
    assert attention.by_block(blocks, "beyond") == ([1], [0.2])
    mean, std = attention.of_steps(blocks)
    np.testing.assert_allclose([mean, std], [[1.0, 0.2], [0.0, 0.3]])
    assert attention.of_values(blocks) is None and attention.of_values(blocks[:1])[1].tolist() == [1.0, 0.7]


def test_probes_have_a_table_of_right_answers_by_length(results, tmp_path):
    for encoding, far in (("rope", 0.25), ("alibi", 0.5)):
        made = record(encoding, 0, 1.0) | {"metrics": {"loss": 1.0, "accuracy": 1.0}}
        del made["extrapolation"]
        made["probe"] = {"protocol": {}, "lengths": {"64": {"accuracy": 1.0}, "512": {"accuracy": far}}}
        results(made)
    call(report, "--results")
    text = (tmp_path / "results" / "novel-size=small.md").read_text()
    assert "| encoding | seeds | parameters | right % 64 | right % 512 |" in text
    assert "| rope | 1 | 1,234 | 100.0 | 25.0 |" in text and "| alibi | 1 | 1,234 | 100.0 | 50.0 |" in text


def test_a_recurrence_is_named_as_such():
    made = record("none", 0, 1.0)
    assert records.encoding(made) == "none"
    made["config"]["model"] = {**made["config"]["model"], "mixer": "recurrence"}
    assert records.encoding(made) == "recurrence"
