"""What `jojax.show` draws, against plain NumPy loops over pairs; and the pictures and sentences it ends with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference
import runs
import zoo
from configs.encodings import preset
from jojax import coherence, encodings, show, task
from jojax.encodings.rope import Rope
from jojax.errors import UserError
from runs import lm, trained, vit

B, L, H, G, D, C = 2, 9, 6, 3, 4, 20
DIMS = encodings.Dims(heads=H, kv_heads=G, head_dim=D, width=C, depth=1, vocab=17, length=64)


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def answered(name, rng):
    """(Context, Journey) of a first block, parameters drawn."""
    normal = lambda *shape: jnp.asarray(rng.normal(size=(B, L, *shape)))  # noqa: E731
    ctx = encodings.Context(
        position=jnp.broadcast_to(jnp.arange(L, dtype=float)[:, None], (B, L, 1)),
        restart=jnp.broadcast_to(jnp.arange(L) == 0, (B, L)),
        segment=jnp.broadcast_to(jnp.arange(B)[:, None], (B, L)),
        **dict(x=normal(C), residual=normal(C), q=normal(H, D), k=normal(G, D)),
    )
    encoding = encodings.build(preset(name), DIMS, "float64")(parent=None)
    like = jax.eval_shape(lambda: encoding.init(jax.random.key(0), None, None, ctx, method="journey"))
    variables = jax.tree.map(lambda t: rng.normal(size=t.shape), like)
    return ctx, encoding.apply(variables, None, None, ctx, method="journey")


def pairs(n):
    return [(k, k - n) for k in range(n, L)]


def journeys(journey, b, g):
    """P_{j→k} as dense matrices, [k][j]."""
    A = [reference.plane_rotation(a) for a in np.asarray(journey.value_frame.angles)[b, :, g]]
    return [[A[k].T @ A[j] for j in range(L)] for k in range(L)]


def test_distances_and_their_means(rng):
    ctx = answered("none", rng)[0]
    d = coherence.distances(ctx, causal=True)
    assert d.tolist() == [[k - j if j <= k else -1 for j in range(L)] for k in range(L)]
    table = rng.normal(size=(2, L, L))
    x, means = coherence.by_distance(table, d)
    assert x.tolist() == [*range(7)]  # two pairs are too few for a mean over nine sites
    want = [[np.mean([t[k, j] for k, j in pairs(n)]) for n in x] for t in table]
    np.testing.assert_allclose(means, want, atol=1e-12)
    grid = np.array([(0, 0), *np.ndindex(2, 3)])  # the first has no place
    image = ctx.replace(position=grid[None], placed=np.arange(7)[None] > 0)
    d = coherence.distances(image, causal=False)
    assert (d[0] == -1).all() and (d[:, 0] == -1).all() and d[1, 6] == 2 and d[6, 1] == 2 and d[3, 4] == 2


def test_match_and_coherence_are_means_over_pairs(rng, float64):
    """Of jo_random, whose journeys differ from row to row and pair to pair."""
    ctx, journey = answered("jo_random", rng)
    d = coherence.distances(ctx, causal=True)
    P = [[journeys(journey, b, g) for b in range(B)] for g in range(G)]
    want = [
        [[np.mean([np.trace(P[g][b][k][j]) / D for b in range(B)]) for j in range(L)] for k in range(L)]
        for g in range(G)
    ]
    np.testing.assert_allclose(coherence.match(journey.frame, ctx), want, atol=1e-10)
    alike, up_to = coherence.of_values(journey, ctx, d, [0, 2, 5])
    v = np.random.default_rng(0).normal(size=(coherence.PROBES, D))
    v /= np.linalg.norm(v, axis=1, keepdims=True)
    for i, n in enumerate([0, 2, 5]):
        for g in range(G):
            mean = np.mean([P[g][b][k][j] for b in range(B) for k, j in pairs(n)], axis=0)
            np.testing.assert_allclose(alike[g, i], np.sqrt(np.mean([(mean @ z) @ (mean @ z) for z in v])), atol=1e-10)
            means = [np.mean(P[g][b][k][k - n : k + 1], axis=0) for b in range(B) for k in range(n, L)]
            near = np.sqrt(np.mean([(m @ z) @ (m @ z) for m in means for z in v]))
            np.testing.assert_allclose(up_to[g, i], near, atol=1e-10)
    assert alike[:, 2].max() < 0.999 and np.allclose(alike[:, 0], 1)
    fixed = coherence.of_values(answered("jo_fixed", rng)[1], ctx, d, [5])
    np.testing.assert_allclose(fixed[0], 1, atol=1e-12)  # the same journey for all pairs at a distance


def test_real_match(rng, float64):
    ctx, journey = answered("jo_random", rng)
    got = coherence.real_match(journey.frame, ctx)
    unit = lambda t: np.asarray(t) / np.linalg.norm(t, axis=-1, keepdims=True)  # noqa: E731
    q, k = unit(ctx.q), unit(ctx.k)
    for g in range(G):
        P = [journeys(journey, b, g) for b in range(B)]
        heads = (2 * g, 2 * g + 1)
        want = [
            [np.mean([q[b, t, h] @ P[b][t][j] @ k[b, j, g] for b in range(B) for h in heads]) for j in range(L)]
            for t in range(L)
        ]
        np.testing.assert_allclose(got[g], want, atol=1e-10)


def test_bias_is_that_of_the_own_site_and_the_path(rng, float64):
    seen = np.tri(L) > 0
    distance = np.arange(L)[:, None] - np.arange(L)
    ctx, journey = answered("alibi", rng)
    got = np.asarray(coherence.bias(journey, ctx, causal=True))
    np.testing.assert_allclose(got[:, seen], (-reference.slopes(H)[:, None, None] * distance)[:, seen], atol=1e-10)
    ctx, journey = answered("grape_ap_strict", rng)
    got = np.asarray(coherence.bias(journey, ctx, causal=True))
    query, key = np.asarray(journey.edge.query), np.asarray(journey.edge.key)
    for h, k, j in np.ndindex(H, L, L):
        if j <= k:
            z = [[query[b, k, h] @ key[b, t, h // 2] / 8 for t in range(j + 1, k + 1)] for b in range(B)]
            path = np.mean([-np.log1p(np.exp(-np.array(row))).sum() for row in z])
            np.testing.assert_allclose(got[h, k, j], reference.slopes(H)[h] * path, atol=1e-10)
    assert coherence.bias(answered("rope", rng)[1], ctx, causal=True) is None


def test_eigen_angles_are_the_turns_of_a_step(rng, float64):
    ctx, journey = answered("rope", rng)
    omega = 1e4 ** (-2 * np.arange(D // 2) / D)
    steps = coherence.eigen_angles(journey.frame, ctx, step=True)
    np.testing.assert_allclose(steps, np.repeat(omega[:, None], L - 1, 1), atol=1e-7)
    sites = coherence.eigen_angles(journey.frame, ctx, step=False)
    wrapped = np.abs(np.angle(np.exp(1j * np.arange(L) * omega[:, None])))
    np.testing.assert_allclose(sites, -np.sort(-wrapped, 0), atol=1e-7)


class Twice(Rope):
    """A user's own, whose hook calls that of its parent."""

    def journey(self, shared, carry, ctx):
        return super().journey(shared, carry, ctx)


def test_a_pass_is_watched_once_a_block():
    config = runs.config_of(runs.LM, lm(model__depth=3))
    config.encoding.name = f"{__name__}.Twice"
    job = task.make(config)
    params, batch = job.init(jax.random.key(0)), show.random_batch(job, 12)
    seen = coherence.watch(job, params, batch)
    assert len(seen) == 3
    x = np.stack([ctx.x for ctx, _ in seen])
    assert x.shape == (3, show.ROWS, 12, 32) and np.abs(np.diff(x, axis=0)).max() > 1e-3
    embedding = np.asarray(params["embed"]["embedding"])[batch["tokens"]]
    np.testing.assert_allclose(seen[0][0].residual, embedding, atol=1e-6)


# ------------------------------------------------------------------------------- pictures
@pytest.mark.parametrize(
    ("spec", "given"),
    zoo.some(
        [
            (f"{runs.VIT},encoding=comrope_ap_qkv", vit(model__depth=1)),
            (f"{runs.VIT},encoding=sincos2d", vit(model__pool="mean", model__depth=1)),
            ("configs/quickstart.py:smoke,encoding=fox", lm(model__depth=1)),
        ]
    ),
)
def test_pictures(spec, given, tmp_path):
    path = show.show(runs.config_of(spec, given), out=tmp_path / "made.png", length=0 if "vit" in spec else 20)
    assert path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size > 20_000


@pytest.mark.slow
def test_command_draws_a_run_on_held_out_text(tmp_path):
    before = runs.snapshot(trained())
    args = ["-m", "jojax.show", "--workdir", str(trained()), "--length", "24", "--out", str(tmp_path / "made.png")]
    out, err = runs.run(args, env=runs.environment(devices=1))
    assert out == f"plot: {tmp_path / 'made.png'}\n" and err == ""
    assert (tmp_path / "made.png").stat().st_size > 20_000 and runs.snapshot(trained()) == before


def test_a_name_is_a_preset_of_a_config_that_it_fits(monkeypatch):
    monkeypatch.chdir(runs.ROOT)
    assert show.spec_of("fox") == "configs/quickstart.py:encoding=fox"
    assert show.spec_of("comrope_ap") == "configs/cifar100_vit_tiny.py:encoding=comrope_ap"
    with pytest.raises(UserError, match="encoding=ropy: no such preset; there are alibi, "):
        show.spec_of("ropy")
    monkeypatch.chdir(runs.ROOT / "tests")
    with pytest.raises(UserError, match=r"config file configs/quickstart\.py does not exist"):
        show.spec_of("rope")


@pytest.mark.parametrize(
    ("spec", "given", "options", "words"),
    [
        (None, {}, {}, r"give a preset's name or --config .* or --workdir \(a run\), one of them"),
        (runs.LM, lm(), {"block": 2}, r"--block=2: the model has 2, counted from 0, or backwards from -1"),
        (runs.VIT, vit(), {"length": 9}, r"--length=9 is for language models; an image has the sites of its grid"),
        ("configs/quickstart.py:encoding=learned", lm(), {"length": 33}, r"--length=33: .* a table of 32 positions"),
    ],
)
def test_bad_input(spec, given, options, words):
    with pytest.raises(UserError, match=words):
        show.show(spec and runs.config_of(spec, given), **options)
