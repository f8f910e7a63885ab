"""The plane of the value path: its numbers against plain means, and models that lie where their formulas say."""

import json

import numpy as np
import pytest
from scipy.stats import ortho_group

import runs
from scripts import draw_plane


def test_numbers_are_means_over_texts_vectors_and_pairs(rng):
    B, L, D = 3, 7, 4
    alpha = rng.dirichlet(np.ones(L), (B, 2, L))
    P = np.array([[[ortho_group.rvs(D, random_state=rng) for _ in range(2)] for _ in range(5)] for _ in range(B)])
    got = draw_plane.measured(alpha, P)
    texts = [(a, b) for a in range(B) for b in range(a)]
    varied = [np.abs(alpha[a, h, k] - alpha[b, h, k]).sum() / 2 for a, b in texts for h in range(2) for k in range(L)]
    assert got["selection"] == pytest.approx(np.mean(varied))
    v = rng.normal(size=(20_000, D))
    v /= np.linalg.norm(v, axis=1, keepdims=True)
    moved = np.mean([((v @ (M - np.eye(D)).T) ** 2).sum(1).mean() for M in P.reshape(-1, D, D)])
    assert got["composition"] == pytest.approx(np.sqrt(moved) / 2, rel=0.01)
    between = np.mean([((v @ M.T) ** 2).sum(1).mean() for a, b in texts for M in (P[a] - P[b]).reshape(-1, D, D)])
    assert got["by_content"] == pytest.approx(np.sqrt(between) / 2, rel=0.01)


def test_the_ends_of_the_scales():
    stay, turned = np.broadcast_to(np.eye(4), (2, 5, 3, 4, 4)), np.broadcast_to(-np.eye(4), (2, 5, 3, 4, 4))
    one, other = np.eye(6)[[0, 0]], np.eye(6)[[1, 1]]
    assert draw_plane.measured(np.array([[one], [one]]), stay) == dict(selection=0, composition=0, by_content=0)
    assert draw_plane.measured(np.array([[one], [other]]), turned) == dict(selection=1, composition=1, by_content=0)
    faded = draw_plane.measured(None, np.stack([0 * stay[0], stay[0]]))
    assert faded["selection"] == 0 and faded["by_content"] == 0.5


def test_runs_of_one_encoding_are_all_there():
    rows = [("rope", {"run": "a"}), ("alibi", {"run": "b"}), ("rope", {"run": "c"})]
    assert draw_plane.named(rows, ["runs/a", "runs/b", "runs/c"]) == {
        "rope, runs/a": {"run": "a"},
        "alibi": {"run": "b"},
        "rope, runs/c": {"run": "c"},
    }


@pytest.mark.slow
def test_models_lie_where_their_formulas_say(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, given in {
        "rope": {"encoding": {"preset": "rope", "name": "rope"}},
        "jo_fixed": {"encoding": {"preset": "jo_fixed", "name": "rope", "transport": "qkv"}},
        "by_x": {"encoding": {"name": "joformer", "angle_source": "linear", "angle_init": "normal"}},
        "recurrence": {"encoding": {"name": "none"}, "model__mixer": "recurrence"},
    }.items():
        runs.train_here(runs.LM, runs.lm(steps=3, eval__lengths=(), eval__every_steps=0, **given), tmp_path / name)
    monkeypatch.setattr("sys.argv", ["", *(f"{n}" for n in ("rope", "jo_fixed", "by_x", "recurrence"))])
    draw_plane.main()
    out = capsys.readouterr().out
    assert "plot: value_path.png" in out and (tmp_path / "value_path.png").stat().st_size > 1000
    rows = [line.split("|")[2:5] for line in out.splitlines() if line.startswith("| ") and "---" not in line][1:]
    (rope, fixed, projected, recurrence) = np.array(rows, float)
    assert rope[0] > 0 and (rope[1:] == 0).all()
    assert fixed[1] > 0.1 and fixed[2] < 1e-3 < projected[2] and fixed[0] > 0
    assert recurrence[0] == 0 and recurrence[1] > 0.1 and recurrence[2] > 1e-3
    assert len(json.loads((tmp_path / "value_path.json").read_text())) == len(rows)
