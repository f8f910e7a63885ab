"""Keys and values mixed with those of the site before: the formula, documents in one row, chunks, what is refused."""

import jax
import numpy as np
import pytest

import reference
import zoo
from configs.encodings import preset
from jojax import laws
from jojax.errors import UserError
from test_formulas import DEPTH, TOKS, nope

SHIFTED = dict(kv_shift=True)
SUBJECT = laws.models.Subject(preset("jo_projected"), "text", **SHIFTED)


def test_formula():
    """Frames and gates read the shifted keys; without the shift it is another model."""
    model = zoo.lm_of({"name": "none"}, dims=(("depth", DEPTH),), **SHIFTED)
    with jax.enable_x64(True):
        params = zoo.drawn(model, TOKS)
        got = np.asarray(zoo.run(model, params, TOKS))[0]
    plain = jax.tree.map(np.asarray, params)
    np.testing.assert_allclose(got, reference.forward(plain, np.asarray(TOKS)[0], nope, DEPTH), atol=1e-10)
    for name in ("shift_key", "shift_value"):
        left_out = {**plain, "blocks": {k: v for k, v in plain["blocks"].items() if k != name}}
        assert np.abs(got - reference.forward(left_out, np.asarray(TOKS)[0], nope, DEPTH)).max() > 1e-3


@pytest.mark.parametrize("law", ["packed", "chunks", "sites", "causal"])
def test_laws(law):
    assert laws.LAWS[law].check(SUBJECT).good


def test_refused_where_sites_have_no_order():
    with pytest.raises(UserError, match=r"model\.kv_shift mixes a site with the one before"):
        zoo.vit("rope_axial", **SHIFTED)
