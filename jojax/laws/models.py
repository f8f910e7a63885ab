"""Laws of an encoding in a model, text or vision: a function of a subject -> a residual, as in `journeys`."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jojax import encodings
from jojax.laws.journeys import Sample
from jojax.losses import cross_entropy
from jojax.models.attention import EMPTY
from jojax.models.block import Spec
from jojax.models.lm import LM
from jojax.models.vit import ViT

# rows of two or three documents that start at odd places, and one more site than the models are first given
SEGMENT = np.array([[4] * 5 + [9] * 7, [2] * 3 + [7] + [0] * 8], np.int32)
POSITION = np.array([[*range(5), *range(7)], [*range(3), 0, *range(8)]], float)
L, CAPACITY = 11, 13


class Subject(Sample):
    """A sample in a model. What laws share is made once: parameters, and one compiled call for all that has a shape.

    `options`: fields of the blocks' Spec."""

    def __init__(self, config, kind, **options):
        super().__init__(config, kind)
        self.options = options

    def model(self, dtype="float64", attention="xla", config=None, **switches):
        spec = Spec(dims=self.dims, dtype=dtype, attention=attention, **self.options)
        encoding = encodings.build(config or self.config, self.dims, dtype)
        if self.kind == "text":
            return LM(spec, encoding, **switches)
        return ViT(spec, encoding, classes=7, patch=(2, 3), pool="mean", **switches)

    @functools.cached_property
    def inputs(self):
        rng = np.random.default_rng(0)
        if self.kind == "text":
            return rng.integers(0, self.dims.vocab, (2, L + 1), np.int32)
        return rng.normal(size=(5, 2 * self.dims.grid[0], 3 * self.dims.grid[1], 3))

    def like(self, model):
        """Shapes of the parameters: nothing is compiled."""
        return jax.eval_shape(model.init, jax.random.key(1), self.inputs)["params"]

    @functools.cached_property
    def params(self):
        return random_params(self.like(self.model()))

    @functools.cached_property
    def calls(self):
        """Compiled calls, by the attention they use."""
        return {}

    def call(self, *args, attention="xla", params=None, past=None):
        """logits [B, L, V] and the past (text; tokens, position, segment), or logits [B, classes] (image, offset)."""
        if attention not in self.calls:
            model = self.model(attention=attention)

            def text(params, toks, position, segment, past):
                more = dict(position=position, segment=segment, past=past, capacity=CAPACITY)
                return model.apply({"params": params}, toks, **more)

            def vision(params, image, offset, _):
                return model.apply({"params": params}, image, offset=offset)

            self.calls[attention] = jax.jit(text if self.kind == "text" else vision)
        return self.calls[attention](self.params if params is None else params, *args, past)

    def logits(self, toks=None, position=None, segment=None, params=None, shift=0.0):
        """Of the first L sites, or of the images, shifted."""
        if self.kind == "vision":
            return np.asarray(self.call(self.inputs, np.array([shift, -0.5 * shift]), params=params))
        toks = self.inputs[:, :L] if toks is None else toks
        position, segment = (d[:, :L] if t is None else t for d, t in ((POSITION, position), (SEGMENT, segment)))
        return np.asarray(self.call(toks, position + shift, segment, params=params)[0])

    @functools.cached_property
    def whole(self):
        return self.logits()


def random_params(like, scale=0.3, seed=7):
    """Of these shapes, away from any start, so that nothing is equal by accident; gains near one."""
    rng = np.random.default_rng(seed)

    def leaf(path, t):
        return (path[-1].key == "scale") + rng.normal(0, scale, t.shape)

    return jax.tree_util.tree_map_with_path(leaf, like)


def far(a, b):
    return float(np.abs(np.asarray(a) - np.asarray(b)).max())


def relative(s):
    """All coordinates shifted, by whole and by broken numbers; images have no class token here, it has no place."""
    return max(far(s.logits(shift=shift), s.whole) for shift in (5.0, 1000.0, 0.375))


def packed(s):
    """Documents packed into rows against each alone: first in its row, with filler behind it, which cannot matter."""
    found, toks = [], s.inputs[:, :L]
    for row, document in ((r, d) for r in range(len(toks)) for d in np.unique(SEGMENT[r])):
        inside = SEGMENT[row, :L] == document
        n = inside.sum()
        alone, position, segment = (
            (toks + 3) % s.dims.vocab,
            POSITION[:, :L].copy(),
            np.full((len(toks), L), 50, np.int32),
        )
        alone[row, :n] = toks[row, inside]
        position[row, :n], segment[row, :n] = np.arange(n), document
        found.append(far(s.logits(alone, position, segment)[row, :n], s.whole[row, inside]))
    across = far(s.logits(segment=np.ones((len(toks), L), np.int32)), s.whole)  # one document would see across
    return max(found) if across > 1e-3 else math.nan


def streamed(s, cuts, **options):
    """Logits of the sites in chunks, from a past of zeros."""
    past = jax.tree.map(jnp.zeros_like, s.call(s.inputs[:, :L], POSITION[:, :L], SEGMENT[:, :L])[1])
    past["segment"], outs = jnp.full_like(past["segment"], EMPTY), []
    for a, b in itertools.pairwise(cuts):
        out, past = s.call(s.inputs[:, a:b], POSITION[:, a:b], SEGMENT[:, a:b], past=past, **options)
        outs.append(out)
    return np.concatenate(outs, 1)


def chunks(s):
    """Chunks of four and of one site against the whole, and one more site behind the whole against behind them."""
    _, past = s.call(s.inputs[:, :L], POSITION[:, :L], SEGMENT[:, :L])
    after = s.call(s.inputs[:, L:], POSITION[:, L:], SEGMENT[:, L:], past=past)[0]
    return far(streamed(s, (0, 4, 8, 9, 10, 11, 12)), np.concatenate([s.whole, after], 1))


def site_by_site(s, attention="xla"):
    return far(streamed(s, range(L + 1), attention=attention), s.whole)


def causal(s):
    """Another token at t changes no bit before t, and some from t on."""
    found, moved = [], []
    for t in (3, 8):
        toks = s.inputs[:, :L].copy()
        toks[:, t] = (toks[:, t] + 1) % s.dims.vocab
        after = s.logits(toks)
        found.append(far(after[:, :t], s.whole[:, :t]))
        moved.append(far(after[:, t], s.whole[:, t]))
    return max(found) if min(moved) > 0 else math.nan


def unrolled(s):
    """Blocks one after the other, without a cache, against scanned ones with one."""
    model = s.model(scan=False)
    if s.kind == "text":
        more = dict(position=POSITION[:, :L], segment=SEGMENT[:, :L])
        return far(jax.jit(lambda p, x: model.apply({"params": p}, x, **more))(s.params, s.inputs[:, :L]), s.whole)
    return far(jax.jit(lambda p, x: model.apply({"params": p}, x))(s.params, s.inputs), s.whole)


def narrow_gradients(s):
    """Of a loss, in the bfloat16 model with float32 parameters, scanned and rematerialised."""
    model, params = s.model("bfloat16", remat=True), jax.tree.map(np.float32, random_params(s.params, 0.1))

    def loss(params):
        if s.kind == "text":
            more = dict(position=jnp.float32(POSITION[:, :L]), segment=SEGMENT[:, :L])
            out = model.apply({"params": params}, s.inputs[:, :L], **more)
        else:
            out = model.apply({"params": params}, jnp.float32(s.inputs))
        labels = jnp.arange(out[..., 0].size).reshape(out.shape[:-1]) % out.shape[-1]
        return cross_entropy(out, labels).mean()

    with jax.enable_x64(False):
        return jax.device_get(jax.jit(jax.grad(loss))(params))


def gradients(s):
    """How many parameters have gradients that are not finite, or, of the encoding's, that nothing depends on: exactly
    zero in some block in bfloat16, or (where rounding hides a zero) no change of the logits in float64."""
    grads = narrow_gradients(s)
    bad = sum(not np.isfinite(g).all() or g.dtype != np.float32 for g in jax.tree.leaves(grads))
    for path, g in jax.tree_util.tree_leaves_with_path(grads):
        if "['encoding']" in jax.tree_util.keystr(path):
            blocks = g.reshape(len(g), -1) if path[0].key == "blocks" else g.reshape(1, -1)
            # quite another value of this leaf alone: a choice among templates has steps
            nudged = jax.tree_util.tree_map_with_path(
                lambda p, t, at=path: 10 * np.cos(9 * t) if p == at else t, s.params
            )
            bad += not np.abs(blocks).max(1).all() or far(s.logits(params=nudged), s.whole) < 1e-9
    return float(bad)


def start(s):
    """With the encoding's own start, against the encoding that it names as `STARTS_AS`."""
    model, base = s.model(), s.model(config=s.encoding.STARTS_AS)

    @jax.jit
    def initial(key):
        flat = jax.tree_util.tree_leaves_with_path(model.init(key, s.inputs)["params"])
        return {jax.tree_util.keystr(p): t for p, t in flat if "['encoding']" in jax.tree_util.keystr(p)}

    at_start = initial(jax.random.key(1))
    params = jax.tree_util.tree_map_with_path(
        lambda p, t: at_start.get(jax.tree_util.keystr(p), t).astype(float), s.params
    )
    found = {jax.tree_util.keystr(p): t for p, t in jax.tree_util.tree_leaves_with_path(params)}
    bare = jax.tree_util.tree_map_with_path(lambda p, _: found[jax.tree_util.keystr(p)], s.like(base))
    outs = [jax.jit(lambda p, m=m: m.apply({"params": p}, s.inputs))(p) for m, p in ((model, params), (base, bare))]
    return far(*outs)
