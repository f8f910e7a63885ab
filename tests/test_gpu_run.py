"""The prepared run on a GPU, as far as a CPU can tell: what is carried, what is installed, and all stages in small."""

import json
import lzma
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from ml_collections import ConfigDict

import runs
from configs.encodings import preset
from jojax import encodings, laws
from jojax.errors import UserError
from scripts.bench import carry, gpu, train_step
from scripts.bench import encodings as bench_encodings

SCRIPT = runs.ROOT / "scripts" / "bench" / "gpu.sh"


def run(*args, **more):
    paths = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # the script's python3
    env = runs.environment(devices=1, PATH=paths, **more)
    return subprocess.run([SCRIPT, *map(str, args)], env=env, capture_output=True, text=True, timeout=600, check=False)


def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path):
    done = run("--out", tmp_path / "out")
    assert done.returncode == 1 and not (tmp_path / "out").exists()
    assert done.stderr.startswith("error: no GPU: jax ") and done.stderr.count("\n") == 1


# ------------------------------------------------------------------------------------------ packages
def wheel(folder, name, version, *needs):
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {need}" for need in needs)]
        file.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(lines) + "\n")
        file.writestr(f"{name}.py", f"version = {version!r}\n")


@pytest.fixture
def carried(tmp_path, monkeypatch):
    """Some wheels, and a pyproject that asks for things that are here, too old, missing, and nowhere."""
    wheel(tmp_path, "numpy", "1.0")
    wheel(tmp_path, "flax", "999.0", "jax", "jojax_absent_need; python_version > '3'", "jojax_never; extra == 'x'")
    wheel(tmp_path, "jojax_absent", "2.0")
    wheel(tmp_path, "jojax_absent_need", "3.0")
    asked = ["numpy>=1.0", "flax>=999", "jojax_absent", "jojax_nowhere>=1"]
    monkeypatch.setattr(carry, "wanted", lambda: asked)
    return tmp_path


def test_only_what_lacks_is_installed(carried):
    chosen, unmet = carry.lacking(carry.wheels(carried))
    assert set(chosen) == {"flax", "jojax-absent", "jojax-absent-need"}
    assert unmet == ["jojax_nowhere>=1"]


def test_wheels_are_installed_into_a_folder_of_their_own(carried, tmp_path, capfd):
    (tmp_path / "wheels").mkdir()
    wheel(tmp_path / "wheels", "jojax_absent", "2.0")
    given = carry.argparse.Namespace(folder=tmp_path, target=tmp_path / "site")
    assert carry.install(given) == 0
    assert [path.name for path in (tmp_path / "site").glob("*.py")] == ["jojax_absent.py"]
    assert "neither here nor carried: " in capfd.readouterr().out


def test_what_is_carried_is_all_that_pyproject_needs_beside_jax():
    there = {name for name, _ in carry.walk(carry.THERE, carry.installed)}
    names = {name for name, _ in carry.walk(carry.wanted(), carry.installed)} - there
    assert {"clu", "grain", "ml-collections", "tensorboardx", "array-record", "wrapt"} <= names
    assert not {"jax", "jaxlib", "numpy", "tensorstore", "scipy"} & (names | carry.SPARE)


def test_too_much_to_carry_is_told(tmp_path, monkeypatch):
    folder = tmp_path / "carry"
    (folder / "wheels").mkdir(parents=True)
    (folder / "wheels" / "large.whl").write_bytes(b"0" * 2_000_000)
    monkeypatch.setattr(carry, "packages", lambda *_: None)
    monkeypatch.setattr(carry, "text", lambda *_: None)
    given = carry.argparse.Namespace(folder=folder, data=tmp_path, python="3.12", limit=1.0)
    with pytest.raises(SystemExit, match=r"MiB in all, more than --limit=1\.0"):
        carry.gather(given)
    given.limit = 1000.0
    carry.gather(given)
    assert json.loads((folder / "carried.json").read_text())["wheels"] == ["large.whl"]


def test_a_tokenizer_is_of_the_novels_that_are_carried(tmp_path, monkeypatch):
    source, folder = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    small = ConfigDict({"data": {"vocab": 260}})
    monkeypatch.setattr("jojax.config.load", lambda spec: small)

    def carried(word):
        for split in ("train", "valid"):
            with lzma.open(source / f"eltec_eng_{split}.jsonl.xz", "wt") as file:
                file.write(json.dumps({"text": f"{word} " * 50}) + "\n")
        carry.text(folder, source)
        return (folder / "tokenizer.json").read_text()

    first = carried("whale")
    (folder / "tokenizer.json").write_text("kept")
    assert carried("whale") == "kept"
    assert carried("heath") not in ("kept", first)


# ------------------------------------------------------------------------------------------ stages
def test_the_models_have_the_encodings_that_are_timed():
    for kind, names in (("text", gpu.TEXT), ("vision", gpu.VISION)):
        for name in names:
            encodings.build(preset(name), laws.journeys.DIMS[kind])
    with pytest.raises(UserError):  # as this would
        encodings.build(preset("comrope_ld"), laws.journeys.DIMS["text"])


@pytest.fixture
def made(tmp_path):
    """A run of five minutes whose stages are commands of the test's."""
    given = gpu.argparse.Namespace(out=tmp_path, carry=tmp_path / "none", minutes=5, tiny=True)
    return gpu.Run(given, tmp_path / "work")


def test_stages_survive_each_other_and_their_time(made, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "LEAST", 1)
    made.stage("install", ["-c", "raise SystemExit(3)"])
    made.stage("kernels", ["-c", "import time; time.sleep(60)"], ["-c", "pass"], seconds=1)
    made.stage("pace", ["-c", "pass"])
    made.seconds = 0
    made.stage("vit_s", ["-c", "pass"])
    made.extrapolate()
    states = {name: stage["state"] for name, stage in json.loads((tmp_path / "run.json").read_text())["stages"].items()}
    assert states["install"] == "failed, exit codes [3]" and states["kernels"] == "out of time"
    assert states["pace"] == "done" and states["vit_s"] == "not run: no time is left"
    assert states["extrapolation"].startswith("not run: ")


def test_rows_are_added_beside_those_of_other_models(tmp_path):
    row = dict(model="a", encoding="rope", form="bf16", data="streamed", seconds=1.0)
    for change in ({}, {"model": "b"}, {"seconds": 2.0}):
        train_step.save(tmp_path / "steps.json", {"device": "none"}, [row | change])
    assert json.loads((tmp_path / "steps.json").read_text())["rows"] == [row | {"model": "b"}, row | {"seconds": 2.0}]


def test_benchmarks_without_names_run_their_defaults(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(sys, "argv", ["a benchmark"])
    monkeypatch.setattr(train_step, "product", lambda *_: 1.0)
    monkeypatch.setattr(train_step, "cases", lambda given: asked.append(given.models) or [])
    assert train_step.main() == 0 and asked.pop() == ["vit_tiny", "vit_s", "lm_c128", "lm_c512"]
    for part in ("layers", "steps", "rotation", "path"):
        monkeypatch.setattr(bench_encodings, part, lambda *_, part=part, **names: asked.append(part))
    bench_encodings.main()
    assert asked == ["layers", "steps", "rotation", "path"]
    monkeypatch.setattr(sys, "argv", ["a benchmark", "steps", "--only", "fox"])
    with pytest.raises(SystemExit):
        bench_encodings.main()
    assert "--only names presets of `layers`, which is not asked for" in capsys.readouterr().err


@pytest.mark.slow
def test_every_stage_in_small(tmp_path):
    done = run("--tiny", "--minutes", 30, "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert set(found) == {"run.json", "kernels.json", "steps.json", "rope.json", "jo_projected.json"}
    record = found["run.json"]
    assert record["state"] == "finished" and record["device"] == "cpu"
    assert {stage["state"] for stage in record["stages"].values()} == {"done"}
    assert record["stages"]["extrapolation"]["measured"] == ["rope"]  # the other's pace is assumed
    assert {row["model"] for row in found["steps.json"]["rows"]} == {"lm_layer", "vit_s", "lm_c768"}
    assert all(row["good"] for row in found["kernels.json"]["rows"])
    for name in ("kernels.json", "steps.json"):
        assert found[name]["device"]["kind"] == "cpu"
    for name in gpu.TRAINED:
        made = found[f"{name}.json"]
        assert made["state"] == "finished" and made["config"]["steps"] == made["steps"] == 2
        assert set(made["extrapolation"]["lengths"]) == {"16", "32"} and made["devices"]["kind"] == "cpu"
    assert "== kernels, at most" in (tmp_path / "run.log").read_text()
