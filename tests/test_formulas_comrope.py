"""ComRoPE, LieRE and their baselines in whole vision transformers against the plain formulas in float64: a matrix
exponential of the dense generator for every site, the class token's too. Op by op, as in test_formulas_vit.py."""

import jax
import numpy as np
import pytest
from scipy.linalg import expm

import reference
import reference_rotary
import zoo
from jojax.encodings.coordinates import Places
from test_formulas_vit import DEPTH, GRIDS, PATCH, D, G, image, nope

AP = {"name": "comrope", "partition": "ap"}
LD = {"name": "comrope", "partition": "ld"}
LIERE = {"name": "liere"}
UNIT10K = zoo.preset("rope_unit10k")
NONE, OFF = dict(cls_pos="none"), (1.5, -0.25)
DEFAULTS = {
    "comrope": dict(block=8, ld_theta="head", coord="unit_center", cls_pos="center", transport="qk"),
    "liere": dict(block=8, share_layers=False, coord="train_prop_linspace", cls_pos="none", transport="qk"),
    "rope": {},
}


def scaled(coord, at, n, trained):
    """The coordinate of index `at` on an axis of n patches, `trained` at the training size."""
    return {
        "index": at,
        "unit_center": (at + 0.5) / n,
        "train_prop": at / trained,
        "train_prop_linspace": at / (n - 1) * n / trained,
    }[coord]


def coordinates(o, pool, trained, offset, noise):
    """u [L, 2], the class token first; None in place of it where it stands at no place."""
    grid = GRIDS[pool]
    at = np.indices(grid).reshape(2, -1).T + np.array(offset)
    middle = (np.array(grid) - 1) / 2 + np.array(offset)
    at = np.concatenate([[middle], at]) if pool == "cls" else at
    at = at if noise is None else at + noise
    return np.array([[scaled(o["coord"], site[a], grid[a], trained[a]) for a in (0, 1)] for site in at])


def generator(o, p, a, g, axes=2, size=D):
    """A_a of a key head, [D, D]"""
    out, b = np.zeros((size, size)), o["block"]
    for j in range(size // b):
        if o["name"] == "liere":
            own = np.triu(p["u"][a, g, j], 1) if o.get("triangle", True) else p["u"][a, g, j]
        elif o["partition"] == "ap":
            own = p["p"][g, j] * (j % axes == a)
        else:
            own = p["p"][g, j] * p["theta"][a, g if o["ld_theta"] == "head" else 0, j]
        out[j * b : (j + 1) * b, j * b : (j + 1) * b] = own - own.T
    return out


def encode(options, params, pool, trained, offset=(0, 0), noise=None, swap=False):
    o = DEFAULTS[options["name"]] | options
    u = coordinates(o, pool, trained, offset, noise)
    u = u[:, ::-1] if swap else u
    if o["name"] == "rope":
        return reference_rotary.encode(options, params, u, G, D)

    def of_block(layer, p, h, x, before):
        p = params["encoding"] if o.get("share_layers") else p
        parts = [[generator(o, p, a, g) for g in range(G)] for a in (0, 1)]
        A = np.array([[expm(site[0] * parts[0][g] + site[1] * parts[1][g]) for g in range(G)] for site in u])
        if pool == "cls" and o["cls_pos"] == "none":
            A[0] = np.eye(D)
        here = np.broadcast_to(np.eye(D), A.shape)
        return A if "qk" in o["transport"] else here, A if "v" in o["transport"] else None, 0

    return of_block


# options, pooling, offset, training grid (None = that of the image) -> options of formulas that must not equal it
CASES = {
    "ap_2": (AP | {"block": 2}, "cls", (0, 0), None, NONE),
    "ap_4_none": (AP | {"block": 4} | NONE, "cls", OFF, None, dict(cls_pos="center")),
    "ap_8_values": (AP | {"transport": "qkv"}, "mean", (0, 0), None, dict(transport="qk")),
    "ld_2_shared": (LD | {"block": 2, "ld_theta": "shared"}, "cls", OFF, None, NONE),
    "ld_4_values": (LD | {"block": 4, "transport": "qkv"}, "cls", OFF, None, dict(transport="v"), NONE),
    "ld_8": (LD | {"transport": "v"}, "mean", (0, 0), None, dict(transport="qk")),
    "ld_index": (LD | {"coord": "index"}, "cls", OFF, (4, 3), dict(coord="train_prop"), NONE),
    "ld_unit": (LD | NONE, "cls", OFF, (4, 3), dict(coord="index")),
    "ap_prop": (AP | {"coord": "train_prop"} | NONE, "cls", OFF, (4, 3), dict(coord="train_prop_linspace")),
    "liere_dense": (LIERE | {"block": 16}, "cls", OFF, (4, 3), dict(coord="train_prop")),
    "liere_8": (LIERE | {"share_layers": True, "transport": "qkv"}, "mean", OFF, None, dict(transport="qk")),
    "liere_4": (LIERE | {"block": 4, "coord": "unit_center", "cls_pos": "center"}, "cls", OFF, (4, 3), NONE),
    "liere_free": (LIERE | {"triangle": False} | NONE, "cls", OFF, (4, 3), dict(triangle=True)),
    "liere_2": (LIERE | {"block": 2, "coord": "index"}, "mean", OFF, (4, 3), dict(coord="train_prop")),
    "unit10k": (UNIT10K, "cls", OFF, (4, 3), dict(pairing="half"), dict(base=100.0)),
}


def model_and_params(options, pool, trained, images):
    model = zoo.vit_of(options, dims=(("depth", DEPTH), ("grid", trained)), model=(("pool", pool),))
    with jax.enable_x64(True):
        return model, zoo.drawn(model, images)


def logits(model, params, images, **kw):
    with jax.enable_x64(True):
        return np.asarray(zoo.run(model, params, images, **kw))


def formula(params, one_image, encode):
    return reference.vit(params, one_image, encode, DEPTH, PATCH)


@pytest.mark.parametrize("case", zoo.some(CASES))
def test_frames_are_matrix_exponentials(case):
    options, pool, offset, trained, *changes = CASES[case]
    trained = trained or GRIDS[pool]
    model, params = model_and_params(options, pool, trained, image(pool))
    (got,) = logits(model, params, image(pool), offset=offset)
    right = encode(options, params, pool, trained, offset)
    np.testing.assert_allclose(got, formula(params, image(pool)[0], right), atol=1e-10)
    wrong = [encode(options | change, params, pool, trained, offset) for change in changes]
    for other in (nope, encode(options, params, pool, trained, offset, swap=True), *wrong):
        assert np.abs(got - formula(params, image(pool)[0], other)).max() > 1e-5


@pytest.mark.parametrize(
    "options",
    zoo.some(
        [
            LIERE | {"block": 4, "perturb_sigma": 0.5, "perturb_mode": "truncnorm", "perturb_per_sample": True},
            AP | {"block": 4, "perturb_sigma": 1.0},
            UNIT10K | {"perturb_sigma": 1.0, "perturb_scale": 1.0},
        ]
    ),
    ids=lambda o: o["name"],
)
def test_training_with_perturbed_coordinates(options, monkeypatch):
    """The formula at the coordinates that were drawn: once, for all blocks; not in evaluation."""
    drawn, images = [], np.concatenate([image("cls"), image("cls") ** 2])
    original = Places.noise
    monkeypatch.setattr(Places, "noise", lambda self, ctx: (drawn.append(original(self, ctx)), drawn[-1])[1])
    model, params = model_and_params(options, "cls", GRIDS["cls"], images)
    drawn.clear()
    rngs = {"encoding": jax.random.key(3)}
    with jax.enable_x64(True):
        run = jax.jit(lambda p: (model.apply({"params": p}, images, train=True, rngs=rngs), drawn))
        got, (noise,) = jax.device_get(run(params))
    drawn.clear()
    assert noise.shape == (2 if options.get("perturb_per_sample") else 1, 9, 2) and not noise[:, 0].any()
    still = logits(model, params, images)
    for row in (0, 1):
        own = np.asarray(noise[min(row, len(noise) - 1)])
        want = formula(params, images[row], encode(options, params, "cls", GRIDS["cls"], noise=own))
        np.testing.assert_allclose(got[row], want, atol=1e-10)
        assert np.abs(got[row] - still[row]).max() > 1e-6
    assert drawn == [None]


# Absolute: a table read between its cells


def read(table, u, clamp=True):
    """Bilinear at u [2] in [0, 1]: cells have their centres at (i + ½)/n."""
    y, x = (u[a] * n - 0.5 for a, n in enumerate(table.shape[:2]))
    out = 0
    for i in range(-20, 40):
        for j in range(-20, 40):
            weight = max(0, 1 - abs(y - i)) * max(0, 1 - abs(x - j))
            cell = table[min(max(i, 0), table.shape[0] - 1), min(max(j, 0), table.shape[1] - 1)]
            out = out + weight * cell * (clamp or (0 <= i < table.shape[0] and 0 <= j < table.shape[1]))
    return out


@pytest.mark.parametrize(
    ("pool", "trained", "offset", "cls_pos"),
    [("cls", (4, 3), (0, 0), "center"), ("cls", (2, 4), (0, 0), "none"), ("mean", (2, 4), (7.5, -0.25), "center")],
)
def test_a_table_sampled_between_its_cells(pool, trained, offset, cls_pos):
    options = {"name": "ape_grid", "cls_pos": cls_pos}
    model, params = model_and_params(options, pool, trained, image(pool))
    (got,) = logits(model, params, image(pool), offset=offset)
    table = params["encoding"]["table"]

    def begin(x, columns=True, token=cls_pos, clamp=True):
        u = coordinates({"coord": "unit_center"}, pool, trained, offset, None)
        added = np.array([read(table, site * [1, columns], clamp) for site in u])
        if pool == "cls" and token == "none":
            added[0] = 0
        return x + added

    def of(**changes):
        return reference.vit(params, image(pool)[0], nope, DEPTH, PATCH, lambda x: begin(x, **changes))

    np.testing.assert_allclose(got, of(), atol=1e-10)
    wrong = [dict(columns=False)]  # the released code's error
    wrong += [dict(token="center" if cls_pos == "none" else "none")] if pool == "cls" else [dict(clamp=False)]
    for changes in wrong:
        assert np.abs(got - of(**changes)).max() > 1e-5
