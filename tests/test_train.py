"""Training through the command line: what a run prints, leaves behind and never does."""

import math
import subprocess
import sys

import numpy as np
import pytest

from jojax import evaluate
from runs import (
    LM,
    ROOT,
    STEPS,
    VIT,
    arguments,
    environment,
    lm,
    losses,
    result,
    run,
    snapshot,
    told,
    train_here,
    trained,
    vit,
)
from test_writer import events

# design of the record: what every finished run says of itself
FIELDS = {
    *("schema", "config_name", "config", "overrides", "seed", "commit", "dirty", "command", "versions", "devices"),
    *("state", "parameters", "steps", "wall_seconds", "compile_seconds", "metrics", "protocol", "scored"),
}


@pytest.fixture(scope="module")
def without_tensorflow(tmp_path_factory):
    """An environment in which an import of TensorFlow would succeed and leave a mark; and the mark's path."""
    folder = tmp_path_factory.mktemp("fake")
    (folder / "tensorflow.py").write_text(f"open({str(folder / 'mark')!r}, 'w')\n")
    env = environment(devices=1, PYTHONPATH=str(folder))
    subprocess.run([sys.executable, "-c", "import tensorflow"], env=env, check=True)
    assert (folder / "mark").exists()
    (folder / "mark").unlink()
    return env, folder / "mark"


QUICKSTART = "configs/quickstart.py:smoke"


def check_record(workdir, spec, overrides):
    record = result(workdir)
    assert set(record) >= FIELDS and record["state"] == "finished" and record["config_name"] == spec
    assert record["overrides"] == {k: list(v) if isinstance(v, tuple) else v for k, v in overrides.items()}
    assert record["command"].startswith(f"python -m jojax.train --config {spec} --workdir")
    assert record["devices"] == {"platform": "cpu", "kind": "cpu", "count": 1, "processes": 1}
    count = record["parameters"]
    assert count["total"] == count["body"] + count["encoding"] > 0
    assert record["wall_seconds"] > 0 < record["compile_seconds"]
    assert math.isfinite(record["metrics"]["loss"])
    return record


def test_language_model(without_tensorflow, tmp_path):
    """The quickstart's own data and tokenizer; the model is narrower and the evaluation cut short."""
    env, mark = without_tensorflow
    few = {"eval.document_tokens": 256, "eval.tokens_per_batch": 2048, "data.cache": str(tmp_path / "cache")}
    few |= {"model.width": 32, "model.heads": 2}
    out, err = run(arguments(QUICKSTART, few, tmp_path / "run"), env=env)
    assert "step 4/4  loss" in out and "tokens/s" in out and "result: " in out and err == ""
    assert not mark.exists()
    record = check_record(tmp_path / "run", QUICKSTART, few)
    assert (record["steps"], record["tokens"]) == (4, 4 * 16 * 128)
    assert record["scored"] == record["protocol"]["predictions"] == 11 * 256
    assert record["parameters"]["encoding"] == 2048 * 16 + (4 * 32 + 1) * 16  # angle table, one head
    rows = record["extrapolation"]["lengths"]
    assert list(rows) == ["128", "256"] and rows["256"]["ratio"] == rows["256"]["ppl"] / rows["128"]["ppl"]
    assert [set(line) for line in told(tmp_path / "run")] == [
        {"step", "train/loss", "train/grad_norm", "train/lr"},
        {"step", "valid/loss", "valid/perplexity", "valid/bits_per_byte"},
    ]
    lines = [(step, tag) for step, tag, _ in events(tmp_path / "run")]
    assert (4, "train/loss") in lines and (4, "valid/loss") in lines
    assert (tmp_path / "run" / "extrapolation.png").stat().st_size > 1000


def test_vision_model(without_tensorflow, tmp_path):
    """With micro-batches, an average of the parameters, dropout and bfloat16."""
    env, mark = without_tensorflow
    given = vit(optim__accumulate=2, optim__ema=0.5, model__dropout=0.1, dtype="bfloat16")
    out, err = run(arguments(VIT, given, tmp_path / "run"), env=env)
    assert "step 4/4  loss" in out and "images/s" in out and err == "" and not mark.exists()
    record = check_record(tmp_path / "run", VIT, given)
    assert (record["steps"], record["examples"], record["scored"]) == (4, 4 * 16, 1000)
    metrics = record["metrics"]
    assert set(metrics) == {"loss", "accuracy", "ema_loss", "ema_accuracy"} and metrics["loss"] != metrics["ema_loss"]
    assert 0 <= metrics["accuracy"] <= 1
    assert (metrics["accuracy"] * 1000) % 1 == pytest.approx(0, abs=1e-9)
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4]  # a step is a step, whatever is accumulated in it
    found = evaluate.evaluate_run(tmp_path / "run", ema=True)["evaluation-ema"]
    assert found.pop("protocol") == {"parameters": "average"} and found.pop("scored") == 1000
    assert found == pytest.approx({name: metrics[f"ema_{name}"] for name in ("loss", "accuracy")}, rel=1e-3)


def test_the_loss_falls():
    loss = losses(trained())
    assert list(loss) == list(range(1, STEPS + 1))
    assert loss[1] == pytest.approx(np.log(257), abs=0.1)  # as good as guessing
    assert loss[STEPS] < loss[1] - 1
    valid = {line["step"]: line["valid/loss"] for line in told(trained()) if "valid/loss" in line}
    assert list(valid) == [10, 20, 30] and valid[30] < valid[20] < valid[10]
    assert valid[30] == result(trained())["metrics"]["loss"]


def test_a_finished_run_is_left_alone(capsys):
    before = snapshot(trained())
    assert train_here(LM, lm(), trained()) == 0
    assert "is finished" in capsys.readouterr().out
    assert snapshot(trained()) == before


def test_dry_run_without_data(tmp_path):
    """Not a file is there; of the model all is said."""
    args = arguments("configs/imagenet_vits.py", {"data.path": "nowhere"}, tmp_path / "run")
    out, err = run([*args, "--dry_run"], env=environment(devices=1))
    assert "blocks/query/kernel" in out and "parameters: 21,975,016" in out and "memory of the state: " in out
    assert "train split missing: nowhere" in out and err == ""
    assert not (tmp_path / "run").exists()


def test_importing_jojax_is_quick():
    code = "import time; t = time.monotonic(); import jojax; print(time.monotonic() - t)"
    assert float(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT)) < 1
