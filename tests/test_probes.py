"""Generated rows: what they ask can be answered from the row alone, is nowhere else, and is scored as a loop does."""

import jax
import numpy as np
import pytest

import runs
from jojax import evaluate
from jojax.data.probes import ASK, HERE, KEY, PAIRS, ROWS, ProbeRows
from jojax.errors import UserError

V = 29
SPEC = "configs/probes.py:smoke"


def passkey(seen):
    (at,) = np.flatnonzero(seen == HERE)
    return seen[at + 1 + len(seen) - 1 - np.flatnonzero(seen == ASK)[0]]


def recall(seen):
    return seen[np.flatnonzero(seen[:-1] == seen[-1])[0] + 1]


def copy(seen):
    (at,) = np.flatnonzero(seen == ASK)
    return seen[len(seen) - 1 - at]


SOLVE = {"passkey": passkey, "recall": recall, "copy": copy}


@pytest.mark.parametrize("kind", SOLVE)
@pytest.mark.parametrize("length", [48, 77])
def test_every_answer_can_be_found_in_what_came_before(kind, length):
    rows = ProbeRows(kind, "valid", length, V)
    asked, places = 0, set()
    for index in range(len(rows)):
        row = rows[index]
        assert row["tokens"].shape == (length,) and (row["segment"][row["weight"] > 0] == 0).all()
        at = np.flatnonzero(row["weight"])
        assert [SOLVE[kind](row["tokens"][: t + 1]) for t in at] == row["targets"][at].tolist()
        asked += len(at)
        places.add(tuple(np.flatnonzero(row["tokens"] == HERE)) if kind == "passkey" else tuple(at))
    assert (
        asked
        == rows.protocol["predictions"]
        == len(rows) * {"passkey": KEY, "recall": PAIRS, "copy": length // 2}[kind]
    )
    assert len(places) == 1 if kind == "copy" else len(places) > 15
    inside = row["segment"] == 0
    np.testing.assert_array_equal(row["targets"][: inside.sum() - 1], row["tokens"][1 : inside.sum()])


def test_rows_are_drawn_apart_and_again():
    rows = {split: ProbeRows("recall", split, 40, V) for split in ROWS}
    same, other = (np.stack([rows["train"][i]["tokens"] for i in range(9)]) for _ in range(2))
    np.testing.assert_array_equal(same, other)
    whole = np.concatenate([same, [rows["valid"][i]["tokens"] for i in range(9)]])
    assert len(np.unique(whole, axis=0)) == 18
    sizes = {int((ProbeRows("copy", "train", 40, V)[i]["weight"]).sum()) for i in range(200)}
    assert sizes == set(range(1, 21))  # in training of every size


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("sort", 64, V), r"data\.name = 'sort': with data\.source = 'probe' choose from passkey, recall, copy"),
        (("recall", 31, V), "a row of 31 tokens is too short for recall: it needs 32"),
        (("copy", 64, 25), r"data\.vocab = 25: probes need 26 symbols or more"),
    ],
)
def test_refused(args, words):
    kind, length, vocab = args
    with pytest.raises(UserError, match=words):
        ProbeRows(kind, "train", length, vocab)


@pytest.mark.slow
def test_a_run_is_scored_as_a_loop_over_its_rows(tmp_path, capsys):
    """Accuracy of the answers and of whole rows, at the training length and beyond; and evaluated further."""
    given = {"model.width": 32, "model.heads": 2, "model.depth": 1, "eval.lengths": (64, 96), "batch_size": 8}
    given |= {"steps": 12, "optim.lr": 0.01, "eval.batch_size": 512, "eval.diagnostics": 0, "data.name": "copy"}
    spec = f"{SPEC},encoding=rope"
    assert runs.train_here(spec, given, tmp_path) == 0
    result = runs.result(tmp_path)
    _, _, job, params, _ = evaluate.restore(tmp_path)
    run, params = jax.jit(job.apply), jax.device_get(params)
    for length, row in result["probe"]["lengths"].items():
        rows = [job.rows("valid", int(length))[i] for i in range(ROWS["valid"])]
        batch = {key: np.stack([r[key] for r in rows]) for key in rows[0]}
        more = {key: batch[key] for key in ("position", "segment")}
        logits = np.asarray(run(params, batch["tokens"], **more), np.float64)
        right, asked = logits.argmax(-1) == batch["targets"], batch["weight"] > 0
        assert row["accuracy"] == pytest.approx(right[asked].mean(), abs=1e-9)
        assert row["whole"] == pytest.approx(np.mean([r[a].all() for r, a in zip(right, asked, strict=True)]))
        picked = np.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
        nll = np.log(np.exp(logits).sum(-1)) - picked
        assert row["loss"] == pytest.approx(nll[asked].mean(), rel=1e-5) and row["scored"] == asked.sum()
    assert result["metrics"]["accuracy"] == result["probe"]["lengths"]["64"]["accuracy"]
    assert result["metrics"]["loss"] < np.log(64) - 0.5
    found = evaluate.evaluate_run(tmp_path, lengths=(128,))
    assert set(found["probe"]["lengths"]) == {"64", "96"} and set(found["probe-128"]["lengths"]) == {"128"}
    assert "length     128: accuracy" in capsys.readouterr().out
