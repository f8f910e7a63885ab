"""Lattices of several axes, in float64, against loops; the theorems about them are in test_theorems.py."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jojax.algebra import grid
from jojax.algebra.grid import Box
from jojax.algebra.journey import ANGLES
from scripts import draw_journey

SHAPE, D = (2, 3, 4), 3


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def orthogonal(rng, *shape):
    return np.linalg.qr(rng.normal(size=(*shape, D, D)))[0]


def walk(steps, path):
    """The product of a path's steps from the origin, by a loop."""
    site, out = [0] * len(SHAPE), np.eye(D)
    for axis in path:
        out = out @ steps[(axis, *site)]
        site[axis] += 1
    return out


@pytest.mark.parametrize("order", [None, (0, 1, 2), (1, 2, 0)])
def test_absolute_operators_go_along_one_axis_after_the_other(order, rng):
    steps = orthogonal(rng, 3, *SHAPE)
    found = np.asarray(jax.jit(partial(grid.absolute, order=order))(steps, jnp.eye(D)))
    axes, other = order or (2, 1, 0), (order or (2, 1, 0))[::-1]
    far = 0
    for site in np.ndindex(*SHAPE):
        one, two = ([axis for axis in by for _ in range(site[axis])] for by in (axes, other))
        np.testing.assert_allclose(found[site], walk(steps, one), atol=1e-12)
        far = max(far, np.abs(found[site] - walk(steps, two)).max())
    assert far > 1e-2


def test_paths_are_all_and_multiply_in_order(rng):
    steps = orthogonal(rng, 3, *SHAPE)
    paths = list(grid.monotone((0, 0, 0), (1, 1, 2)))
    assert sorted(paths) == sorted(set(itertools.permutations((0, 1, 2, 2))))
    for path in paths[:3]:
        np.testing.assert_allclose(grid.along(steps, path, (0, 0, 0)), walk(steps, path), atol=1e-12)
    assert np.abs(grid.along(steps, paths[0], (0, 0, 0)) - walk(steps, paths[0][::-1])).max() > 1e-2


def test_holonomy_is_once_round_each_plaquette(rng):
    steps = orthogonal(rng, 3, *SHAPE)
    found = np.asarray(jax.jit(partial(grid.holonomy, i=2, j=0))(steps))
    assert found.shape == (1, 3, 3, D, D)
    x, y = steps[2], steps[0]
    want = x[0, 1, 2] @ y[0, 1, 3] @ np.linalg.inv(y[0, 1, 2] @ x[1, 1, 2])
    np.testing.assert_allclose(found[0, 1, 2], want, atol=1e-12)
    np.testing.assert_allclose(jax.jit(partial(grid.holonomy, i=0, j=2))(steps)[0, 1, 2], want.T, atol=1e-12)


def test_flat_is_told_from_curved(rng):
    flat = jax.jit(partial(grid.flat, tolerance=1e-12, group=ANGLES))
    constant = np.array(grid.constant(rng.normal(size=(3, 2)), SHAPE))
    assert flat(constant)
    constant[2, 0, 2, 1, 0] += 1e-6  # one step of one plane
    assert not flat(constant)
    assert grid.curvature(rng.normal(size=(1, 5, 2)), ANGLES) == 0  # a line has no plaquette
    assert flat(rng.normal(size=(3, 1, 1, 4, 2)))


def test_boxes_compose_where_they_fit(rng):
    r, (v, w) = orthogonal(rng, 2), rng.normal(size=(2, D))
    whole = grid.compose(Box(v, (2, 1)), Box(w, (3, 1)), 0, r)
    np.testing.assert_allclose(whole.content, v + r[0] @ r[0] @ w, atol=1e-12)
    assert whole.extent == (5, 1)
    with pytest.raises(ValueError, match=r"boxes of \(2, 1\) and \(3, 1\) do not fit along axis 1"):
        grid.compose(Box(v, (2, 1)), Box(w, (3, 1)), 1, r)


def test_the_picture_is_drawn_and_small(tmp_path):
    draw_journey.main([str(tmp_path / "journey.png")])
    assert 1e4 < (tmp_path / "journey.png").stat().st_size < 1e5
    carried = [draw_journey.carried(np.ones((2, 3, 3, 1)), path)[-1] for path, *_ in draw_journey.PATHS.values()]
    assert carried == [((2, 2), -4.0)] * 2
