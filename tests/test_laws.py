"""The laws can fail: each has an encoding that is wrong on purpose. And the command, for encodings of one's own."""

import jax
import numpy as np
import pytest

import runs
import wrong
import zoo
from jojax import laws
from jojax.errors import UserError
from jojax.laws.__main__ import main
from jojax.models import build


@zoo.functools.cache
def subject(encoding):
    return laws.models.Subject(wrong.config(encoding), "text")


@pytest.mark.parametrize(("law", "encoding"), [(law, e) for law, broken in wrong.BREAKS.items() for e in broken])
def test_what_is_wrong_is_caught(law, encoding):
    finding = laws.LAWS[law].check(subject(encoding))
    assert not finding.good and finding.holds is not None, finding


def test_every_law_can_fail():
    assert set(wrong.BREAKS) == set(laws.LAWS)


def test_suffix_sums_are_right_as_a_whole():
    """And cannot be handed on: see above."""
    made, fixed = subject(wrong.Suffix), zoo.subject("jo_fixed", "text")
    with jax.enable_x64(True):
        np.testing.assert_allclose(made.whole, fixed.whole, atol=1e-10)


def test_a_residual_that_is_no_number_shows_nothing():
    for residual in (float("nan"), 1e-6):
        finding = laws.Law("", lambda s, r=residual: r, "FLAT", 1e-9, 1e-3).check(zoo.subject("none", "text"))
        assert finding.holds is None and not finding.good and "unclear" in str(finding)


MINE = """
import flax.linen as nn
import jax.numpy as jnp
from jojax.encodings import Encoding, Journey, path_sum

class Fade(Encoding):
    rate: float = 0.1
    CAUSAL_ONLY, FLAT = True, False

    @nn.compact
    def journey(self, shared, carry, ctx):
        gate = nn.softplus(nn.Dense(self.dims.kv_heads, dtype=ctx.position.dtype, name="gate")(ctx.x))
        _, through, last = path_sum(self.rate * gate, ctx)
        query = jnp.ones((*through.shape[:2], self.dims.heads, 1), through.dtype)
        return Journey(lift=(query, through[..., None]), prefix=last)
"""

WOUND = ["flat", "chunks", "sites"]  # a sum of the sums that starts anew in each chunk


def test_an_encoding_of_ones_own(package, capsys):
    """One file, all laws by its dotted path, and a model by its config; one that is wrong is told apart."""
    package("fade", MINE)
    assert main(["laws", "mypackage.fade", "rate=0.2"]) == 0
    out = capsys.readouterr().out
    shown = [law.name for law in laws.LAWS.values() if law.name in out]
    assert shown == [law.name for key, law in laws.LAWS.items() if key != "start"]
    assert out.startswith("mypackage.fade in a text model") and out.endswith("all hold\n") and "broken" not in out

    package("wound", MINE.replace("FLAT = True, False", "FLAT = True, True").replace("through[", "through.cumsum(1)["))
    assert main(["laws", "mypackage.wound"]) == 1
    out = capsys.readouterr().out
    broken = [line for line in out.split("\n") if line.endswith("<- broken")]
    assert [key for key, law in laws.LAWS.items() if any(law.name in line for line in broken)] == WOUND
    assert out.endswith("3 broken\n")

    config = runs.config_of(runs.LM, runs.lm(encoding={"name": "mypackage.fade", "rate": 0.5}))
    model = build.build(config)
    assert model.encoding(parent=None).rate == 0.5
    toks = np.zeros((1, 3), np.int32)
    assert "gate" in jax.eval_shape(model.init, jax.random.key(0), toks)["params"]["blocks"]["encoding"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([], "name an encoding: a module of jojax.encodings or a dotted path, then option=value"),
        (["rope", "learned"], "'learned' is no option of an encoding: give option=value"),
        (["rope", "form=round"], "encoding.form = 'round': choose from 1d, axial, mixed"),
    ],
)
def test_what_the_command_does_not_understand_is_told(given, sentence):
    with pytest.raises(UserError) as caught:
        main(["laws", *given])
    assert str(caught.value) == sentence
