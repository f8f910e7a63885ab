"""Keys and values mixed with those of the site before: the formula, documents in one row, chunks, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference
import test_contract
import zoo
from jojax.errors import UserError
from test_formulas import DEPTH, TOKS, nope

SHIFTED = dict(kv_shift=True)


def test_formula():
    """Frames and gates read the shifted keys; without the shift it is another model."""
    model = zoo.lm_of({"name": "none"}, dims=(("depth", DEPTH),), **SHIFTED)
    with jax.enable_x64(True), jax.disable_jit():
        params = zoo.drawn(model, TOKS)
        got = np.asarray(model.apply({"params": params}, TOKS))[0]
    plain = jax.tree.map(np.asarray, params)
    np.testing.assert_allclose(got, reference.forward(plain, np.asarray(TOKS)[0], nope, DEPTH), atol=1e-10)
    for name in ("shift_key", "shift_value"):
        left_out = {**plain, "blocks": {k: v for k, v in plain["blocks"].items() if k != name}}
        assert np.abs(got - reference.forward(left_out, np.asarray(TOKS)[0], nope, DEPTH)).max() > 1e-3


def test_documents_and_chunks():
    with jax.enable_x64(True):
        packed = test_contract.call("jo_projected", **SHIFTED)
        model, params = zoo.lm("jo_projected", **SHIFTED), zoo.lm_params("jo_projected", **SHIFTED)
        chunks = test_contract.in_chunks(model, params, (0, 4, 8, 11))
        np.testing.assert_allclose(chunks, packed, atol=1e-10)
        toks, rest = np.asarray(zoo.tokens()), np.arange(zoo.L - 5)
        alone = toks.copy()  # the second document of row 0 first in its row, a filler behind it
        alone[0] = np.concatenate([toks[0, 5:], toks[0, :5]])
        segment, position = np.full_like(alone, 50), np.tile(np.arange(zoo.L), (zoo.B, 1))
        segment[0, : rest.size] = test_contract.SEGMENT[0, 5]
        out = test_contract.call("jo_projected", jnp.asarray(alone), position, segment, **SHIFTED)
        np.testing.assert_allclose(out[0, : rest.size], packed[0, 5:], atol=1e-10)


def test_refused_where_sites_have_no_order():
    with pytest.raises(UserError, match=r"model\.kv_shift mixes a site with the one before"):
        zoo.vit("rope_axial", **SHIFTED)
