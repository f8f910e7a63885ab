"""What a run leaves in its workdir."""

import fcntl
import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from jojax import result, writer
from jojax.errors import UserError


def events(workdir):
    """(step, tag, value) of the TensorBoard files, read as TFRecords without TensorFlow."""
    from tensorboardX.proto.event_pb2 import Event

    out = []
    for path in sorted(workdir.glob("events.out.tfevents.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + size])
            out += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
            at += 12 + size + 4
    return out


def test_scalars_reach_both_files(tmp_path):
    with writer.Writer(tmp_path / "run") as out:
        out.scalars(1, {"train/loss": jnp.float32(0.5), "rate": 3})
        out.scalars(2, {"train/loss": np.float64(0.25), "rate": float("nan")})
    assert writer.read_metrics(tmp_path / "run") == [
        {"step": 1, "train/loss": 0.5, "rate": 3},
        {"step": 2, "train/loss": 0.25, "rate": None},
    ]
    told = events(tmp_path / "run")
    assert (1, "train/loss", 0.5) in told and (2, "train/loss", 0.25) in told and (1, "rate", 3.0) in told


def test_lines_are_on_disk_before_the_writer_closes(tmp_path):
    out = writer.Writer(tmp_path)
    out.scalars(1, {"loss": 1.0})
    assert writer.read_metrics(tmp_path) == [{"step": 1, "loss": 1.0}]
    out.close()


@pytest.mark.parametrize(("start", "left"), [(4, [2, 4]), (3, [2]), (10, [2, 4, 6]), (0, [])])
def test_resuming_drops_the_lines_after_the_restored_step(tmp_path, start, left):
    with writer.Writer(tmp_path) as out:
        for step in (2, 4, 6):
            out.scalars(step, {"loss": step / 2})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')  # torn by a kill
    assert [line["step"] for line in writer.read_metrics(tmp_path)] == [2, 4, 6]
    with writer.Writer(tmp_path, start=start) as out:
        assert [line["step"] for line in writer.read_metrics(tmp_path)] == left
        out.scalars(start + 1, {"loss": 9.0})
    lines = writer.read_metrics(tmp_path)
    assert [line["step"] for line in lines] == [*left, start + 1]
    assert all(line["loss"] == line["step"] / 2 for line in lines[:-1])
    assert not (tmp_path / "metrics.jsonl.new").exists()


def test_other_processes_write_nothing(tmp_path, capsys):
    with writer.Writer(tmp_path / "run", primary=False) as out:
        out.scalars(1, {"loss": 1.0})
        out.print("line")
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_no_tensorflow_is_loaded(tmp_path):
    code = (
        "import sys; sys.modules['tensorflow'] = None\n"  # an import of it would raise
        "from jojax import writer\n"
        "clu = writer.metric_writers()\n"
        "assert clu.SummaryWriter.__module__ == 'jojax.writer'\n"
        "clu.create_default_writer(sys.argv[1]).write_scalars(1, {'loss': 1.0})\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_progress_line():
    line = writer.progress_line(300, 1500, {"loss": 5.12345, "accuracy": 0.2}, 12_345.6, "tokens", 0.031, 130)
    assert line == "step  300/1500  loss 5.123  accuracy 0.2  12,346 tokens/s  data 3%  ETA 2m10s"
    assert "data" not in writer.progress_line(1, 10, {}, 1.0, "images", 0.0, 1)


def test_unwritable_workdir(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*file/run/metrics.jsonl: Not a directory; make room"):
        writer.Writer(tmp_path / "file" / "run")
    with pytest.raises(UserError, match=r"cannot write .*result.json: Not a directory"):
        writer.write_result(tmp_path / "file" / "run", {})


RECORD = {"config": {}, "state": "finished", "loss": 1}


def test_result_round_trip(tmp_path):
    assert writer.read_result(tmp_path) is None
    config = ConfigDict({"lengths": (1, 2), "lr": 0.1, "deep": {"none": None}})
    record = {
        "config": config,
        "loss": np.float32(0.5),
        "bad": float("inf"),
        "ids": np.arange(2),
        "on": np.bool_(True),
        "state": "running",
    }
    path = writer.write_result(tmp_path / "run", record)
    assert path == tmp_path / "run" / "result.json"
    assert writer.read_result(tmp_path / "run") == {
        "config": {"lengths": [1, 2], "lr": 0.1, "deep": {"none": None}},
        "loss": 0.5,
        "bad": None,
        "ids": [0, 1],
        "on": True,
        "state": "running",
    }
    writer.write_result(tmp_path / "run", RECORD)
    assert writer.read_result(tmp_path / "run") == RECORD
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["result.json"]
    path.write_text("{")
    with pytest.raises(UserError, match=r"result.json is not JSON .*; remove it"):
        writer.read_result(tmp_path / "run")
    for other in ("{}", "[]", '{"config": {}}'):
        path.write_text(other)
        with pytest.raises(UserError, match=r"result.json is no record of a run \(config and state are missing\)"):
            writer.read_result(tmp_path / "run")


def test_a_folder_is_one_run_s(tmp_path):
    with writer.only_one(tmp_path / "run"):
        words = "run is in use by another run: wait for it, or choose another --workdir"
        with pytest.raises(UserError, match=words), writer.only_one(tmp_path / "run"):
            pass
        with writer.only_one(tmp_path / "other"):
            pass
    with writer.only_one(tmp_path / "run"):
        assert [p.name for p in (tmp_path / "run").iterdir()] == [".lock"]
    assert not any((tmp_path / "run").iterdir())


def test_a_folder_is_one_run_s_when_another_ends_just_now(tmp_path, monkeypatch):
    """Between a run's opening the file and locking it: another removes it, and a third one makes it anew."""
    others, lock = [], fcntl.flock

    def late(file, how):
        if not others:
            (tmp_path / ".lock").unlink()
            others.append((tmp_path / ".lock").open("w"))
            lock(others[0], how)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(UserError, match="is in use by another run"), writer.only_one(tmp_path):
        pass
    others[0].close()
    with writer.only_one(tmp_path):
        pass


def test_a_line_that_is_no_metrics_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n[2]\n{"step"')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2 is no line of metrics"):
        writer.read_metrics(tmp_path)


def test_a_record_that_cannot_be_written_leaves_the_old_one(tmp_path):
    writer.write_result(tmp_path, RECORD)
    (tmp_path / "result.json.new").mkdir()  # in the way of the new file
    with pytest.raises(UserError, match="cannot write"):
        writer.write_result(tmp_path, {"loss": 2})
    assert writer.read_result(tmp_path) == RECORD


# the description of a run
def test_describe_run():
    config = ConfigDict({"seed": 3, "lengths": (1, 2), "encoding": {"name": "rope"}})
    record = result.describe_run(config, "configs/F.py:a", {"seed": 3})
    assert json.loads(json.dumps(record)) == record
    names = "schema config_name config overrides seed commit dirty command versions devices"
    assert list(record) == names.split()
    assert record["config"] == {"seed": 3, "lengths": [1, 2], "encoding": {"name": "rope"}}
    assert record["devices"] == {"platform": "cpu", "kind": "cpu", "count": 8, "processes": 1}
    assert {"python", "jojax", "jax", "flax", "optax", "numpy"} <= set(record["versions"])
    assert record["command"].startswith("python ")


def git(folder, *arguments):
    identity = ("-c", "user.name=t", "-c", "user.email=t@t")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_commit_and_changes(tmp_path, monkeypatch):
    source = tmp_path / "repo" / "package"
    source.mkdir(parents=True)
    (source / "__init__.py").write_text("")
    assert result.source_version(source) == (None, None)  # no checkout
    git(tmp_path / "repo", "init")
    assert result.source_version(source) == (None, None)  # a checkout of something else
    git(tmp_path / "repo", "add", "package")
    assert result.source_version(source) == (None, None)  # no commit yet
    git(tmp_path / "repo", "commit", "-m", "one")
    commit, dirty = result.source_version(source)
    assert len(commit) == 40 and dirty is False
    (tmp_path / "repo" / "notes.txt").write_text("beside the source")
    assert result.source_version(source) == (commit, False)
    (source / "new.py").write_text("an untracked module changes what runs")
    assert result.source_version(source) == (commit, True)
    monkeypatch.setenv("PATH", "")  # no git
    assert result.source_version(source) == (None, None)


def test_count_parameters():
    params = {
        "encoding": {"table": np.zeros((3, 4))},
        "blocks": {"mlp": {"kernel": np.zeros((2, 5, 7))}, "encoding": {"bias": np.zeros((2, 6))}},
        "gain": np.zeros(()),
    }
    assert result.count_parameters(params) == {"body": 71, "encoding": 24, "total": 95}
