"""An encoding's hooks as models call them. What they answer is looked over while tracing, so that a slip in an encoding
is told in one sentence, and costs nothing when the model runs.

Models call `begin`, `journey` and `advance` of this module instead of the encoding's own.
"""

import re

import jax
import jax.numpy as jnp
from flax import errors, traverse_util

from jojax.encodings.base import Edge, Journey, wide
from jojax.errors import UserError


def begin(encoding, x, ctx):
    answer = _call(encoding, "begin", x, ctx)
    if not isinstance(answer, tuple) or len(answer) != 3:
        raise _slip(encoding, "begin", f"answers {_kind(answer)}, needs (x, shared, carry)")
    _shape(encoding, "begin", "x", answer[0], dict(B=x.shape[0], L=x.shape[1], C=x.shape[2]))
    return answer


def journey(encoding, shared, carry, ctx):
    answer = _call(encoding, "journey", shared, carry, ctx)
    if not isinstance(answer, Journey):
        raise _slip(encoding, "journey", f"answers {_kind(answer)}, needs a Journey")
    for name in ("frame", "value_frame"):
        if (frame := getattr(answer, name)) is not None:
            _frame(encoding, name, frame, ctx)
    (B, L, H, _), G = ctx.q.shape, ctx.k.shape[2]
    if answer.lift is not None:
        if not isinstance(answer.lift, tuple) or len(answer.lift) != 2:
            raise _slip(encoding, "journey", f"answers {_kind(answer.lift)} as lift, needs (query, key)")
        r = jnp.shape(answer.lift[0])[-1:] or (0,)
        _shape(encoding, "journey", "the lift's query", answer.lift[0], dict(B=B, L=L, H=H, r=r[0]))
        _shape(encoding, "journey", "the lift's key", answer.lift[1], dict(B=B, L=L, G=G, r=r[0]))
    if answer.edge is not None:
        _edge(encoding, answer.edge, (B, L, H, G), wide(ctx.q.dtype))
    if ctx.prefix is not None:
        _alike(encoding, "journey", "answers the prefix", answer.prefix, "the chunk before", ctx.prefix)
    return answer


def advance(encoding, shared, carry, hidden, ctx):
    answer = _call(encoding, "advance", shared, carry, hidden, ctx)
    _alike(encoding, "advance", "answers the carry", answer, "the block before", carry)
    return answer


def _slip(encoding, hook, what):
    return UserError(f"encoding {type(encoding).__name__}: {hook} {what}")


def _kind(thing):
    if isinstance(thing, jax.Array | jax.ShapeDtypeStruct):
        return f"an array {list(thing.shape)}"
    return f"{len(thing)} values" if isinstance(thing, tuple) else f"a {type(thing).__name__}"


def _shape(encoding, hook, what, found, dims, one=()):
    """`one`: axes that may have size one, for all."""
    shape = list(jnp.shape(found))
    fits = len(shape) == len(dims)
    fits = fits and all(n == want or (n == 1 and d in one) for n, (d, want) in zip(shape, dims.items(), strict=True))
    if not fits:
        words = ", ".join(f"{d} or 1" if d in one else d for d in dims)
        raise _slip(encoding, hook, f"answers {what} of shape {shape}, needs [{words}] = {list(dims.values())}")


def _call(encoding, hook, *args):
    def names():
        return set(traverse_util.flatten_dict(encoding.variables.get("params", {})))

    before = names()
    try:
        answer = getattr(encoding, hook)(*args)
    except errors.NameInUseError as error:
        raise _slip(encoding, hook, f"gives one name to two things: {error.args[0].split(' (http')[0]}") from error
    except (errors.AssignSubModuleError, ValueError) as error:
        if "wrapped in `@compact`" not in str(error):
            raise
        raise _slip(encoding, hook, "makes parameters or submodules: decorate it with @nn.compact") from error
    for path in sorted(names() - before):  # there are new ones when a model is initialised
        name, late = path[0], any(part.startswith("advance") for part in path)
        if re.fullmatch(r"[A-Z]\w*_\d+", name):
            raise _slip(encoding, hook, f"makes {name} without a name: give it one, like name='angle'")
        if hook != "begin" and late != (hook == "advance"):
            rule = "such a name is for the hook advance, the last block lacks it"
            rule = "its names must start with 'advance'" if hook == "advance" else rule
            raise _slip(encoding, hook, f"makes the parameter {name!r}: {rule}")
    return answer


def _frame(encoding, name, frame, ctx):
    """It must map keys [B, L, G, D] and grouped queries [B, L, G, H/G, D] to vectors of the same shape."""
    lacking = [m for m in ("apply", "invert", "dual", "where") if not callable(getattr(frame, m, None))]
    if lacking:
        raise _slip(encoding, "journey", f"answers {_kind(frame)} as {name}, which has no {', '.join(lacking)}")
    (B, L, H, D), G = ctx.q.shape, ctx.k.shape[2]
    key, query = (jax.ShapeDtypeStruct(s, ctx.k.dtype) for s in ((B, L, G, D), (B, L, G, H // G, D)))
    for method, x in (("apply", key), ("invert" if name == "value_frame" else "dual", query)):
        try:
            found = list(jax.eval_shape(getattr(frame, method), x).shape)
        except (TypeError, ValueError):
            found = None
        if found != list(x.shape):
            leaves = ", ".join(
                f"{jax.tree_util.keystr(path, simple=True)} {list(t.shape)}"
                for path, t in jax.tree_util.tree_leaves_with_path(frame)
            )
            what = "no answer" if found is None else f"{found}"
            raise _slip(
                encoding,
                "journey",
                f"answers {name} {type(frame).__name__}({leaves}), whose {method} of [B, L, G, …] = {list(x.shape)} "
                f"gives {what}, needs the same shape; angles are [B or 1, L, G or 1, D/2] = {[B, L, G, D // 2]}",
            )


def _edge(encoding, edge, sizes, dtype):
    if not isinstance(edge, Edge):
        raise _slip(encoding, "journey", f"answers {_kind(edge)} as edge, needs an Edge")
    B, L, H, G = sizes
    r, s = (jnp.shape(t)[-1] if jnp.ndim(t) else 0 for t in (edge.query, edge.key))
    _shape(encoding, "journey", "the edge's query", edge.query, dict(B=B, L=L, H=H, r=r), "BH")
    _shape(encoding, "journey", "the edge's key", edge.key, dict(B=B, L=L, G=G, s=s), "BG")
    for t in jax.tree.leaves(edge.weights):
        if jnp.shape(t)[-1:] not in ((H,), (1,)):
            raise _slip(
                encoding,
                "journey",
                f"answers an edge with weights of shape {list(jnp.shape(t))}, whose last axis must be H = {H}, or 1",
            )
    try:
        hash(edge.step)
    except TypeError:
        raise _slip(
            encoding,
            "journey",
            "answers an edge whose step has no hash: make it a frozen dataclass of numbers and strings",
        ) from None
    state, seen = jax.ShapeDtypeStruct((B, H, L), dtype), jax.ShapeDtypeStruct((B, L, L), bool)
    answer = jax.eval_shape(edge.step, state, edge.query, edge.key, seen, edge.weights)
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise _slip(encoding, "journey", f"answers an edge whose step gives {_kind(answer)}, needs (bias, state)")
    _shape(encoding, "journey", "an edge with a bias", answer[0], dict(B=B, H=H, Lq=L, Lk=L), "B")
    _alike(encoding, "journey", "answers an edge whose step gives the state", answer[1], "its first", state)


def _alike(encoding, hook, what, found, whose, wanted):
    """The same tree of the same shapes and dtypes."""

    def told(tree):
        return str(jax.tree.map(lambda t: f"{t.dtype}{list(t.shape)}", tree)).replace("'", "")

    if jax.tree.structure(found) != jax.tree.structure(wanted) or told(found) != told(wanted):
        raise _slip(encoding, hook, f"{what} {told(found)}, needs that of {whose}, {told(wanted)}")
