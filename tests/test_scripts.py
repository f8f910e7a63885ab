"""The sweep and the report: what is run, skipped and told; tables from records alone."""

import json
import re
import sys
from pathlib import Path

import pytest

from jojax import extrapolate
from jojax.errors import UserError
from scripts import report, sweep

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
    own |= {"parameters": {"total": 1234}, "metrics": {"loss": 2.0}}
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
    assert "| rope | 2 | 1,234 | 11.00 (10.00 – 12.00) | 33.00 (30.00 – 36.00) | 14.00 (13.00 – 15.00) |" in text
    assert "| alibi | 1 | 1,234 | 20.00 | 60.00 | 23.00 | 0.375 | 3.000 |" in text and "jo_fixed" not in text
    assert "| learned | 1 | 1,234 | 9.00 | – | – | – | – |" in text
    assert "The same 640 tokens" in text and "50 steps of batch 3" in text and "single run" not in text
    pictures = (tmp_path / "results" / "pictures.md").read_text()
    assert "| jo_fixed | 1 | 1,234 | 87.50 | 0.5000 |" in pictures and "Every row is a single run" in pictures
    assert "30.00 | 90.00" in (tmp_path / "results" / "novel-size=small-optim.lr=0.1.md").read_text()
    assert {p.name for p in (tmp_path / "results" / "plots").iterdir()} == {
        "novel-size=small.png",
        "novel-size=small-optim.lr=0.1.png",
    }
    assert text in capsys.readouterr().out


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
    assert "1 tables agree" in capsys.readouterr().out
    table = tmp_path / "results" / "novel-size=small.md"
    table.write_text(table.read_text().replace("10.00", "9.00"))
    with pytest.raises(SystemExit, match=r"not what its records say \(novel-size=small\)"):
        call(report, "--check")
    call(report, "--results")
    (tmp_path / "results" / "claims.md").write_text("97 %")  # a table without records
    with pytest.raises(SystemExit, match=r"\(claims\.md\)"):
        call(report, "--check")


def test_no_finished_run_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="no finished run under runs/"):
        call(report)


def test_figures_of_the_readme_are_those_of_committed_records():
    """Rows of its tables, lines of its outputs."""
    results, known = ROOT / "results", set()
    for table in results.glob("*.md"):
        known |= set(table.read_text().splitlines())
    for path in (results / "runs").iterdir():
        made = json.loads(path.read_text())
        for scores in (value for key, value in made.items() if key.startswith("extrapolation")):
            known |= set(extrapolate.table(scores).splitlines())
        shown = "  ".join(f"{key} {value:.4g}" for key, value in made["metrics"].items())
        known.add(f"step {made['steps']}: valid {shown}")
    lines = (ROOT / "README.md").read_text().splitlines()
    figures = [line for line in lines if re.match(r"(\| \w+ \| \d| +\d+ +\d+\.\d|step \d+: valid)", line)]
    assert len(figures) >= 12 and not [line for line in figures if line not in known]


SWEEP = """
from configs.quickstart_vit import get_config

def sweep():
    yield {"arg": "encoding=none,smoke", "data.source": "folder", "data.path": "gone"}
    yield {"arg": "encoding=rope_axial,smoke", "seed": 3}
"""


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_sweep_skips_what_is_done_and_goes_on_after_a_failure(jobs, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SWEEP)
    broken, done = (workdir for workdir, _ in sweep.points("mine.py"))
    assert str(done) == "runs/mine-encoding=rope_axial,smoke-seed=3"
    done.mkdir(parents=True)
    (done / "result.json").write_text(json.dumps({"state": "finished", "config": {}}))
    call(sweep, "--config", "mine.py", "--print")
    out, _ = capfd.readouterr()
    assert f"[1/2] {broken}: to do\n" in out and f"[2/2] {done}: finished\n" in out
    assert "jojax.train --config=mine.py:encoding=rope_axial,smoke --config.seed=3 --workdir=runs/mine-" in out
    with pytest.raises(SystemExit) as code:
        call(sweep, "--config", "mine.py", "--jobs", str(jobs))
    out, err = capfd.readouterr()
    assert code.value.code == 1 and err.endswith(f"failed:\n  {broken}\n") and f"[2/2] {done}: finished" in out
    if jobs > 1:
        err = (tmp_path / "runs" / f"{broken.name}.log").read_text()
        assert f"{broken}: to do, exit code 2, see runs/" in out
    assert "gone" in err


def test_a_sweep_that_cannot_begin(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="--jobs 0: give the number of points to run at a time"):
        call(sweep, "--config", str(ROOT / "configs/quickstart.py"), "--jobs", "0")
    (tmp_path / "none.py").write_text("from configs.quickstart_vit import get_config\n")
    with pytest.raises(UserError, match=r"none\.py has no sweep\(\)"):
        sweep.points("none.py")
    (tmp_path / "wrong.py").write_text(SWEEP.replace("rope_axial", "rope_axis"))
    with pytest.raises(UserError, match="rope_axis: no such preset"):  # the second point, before the first runs
        sweep.points("wrong.py")
