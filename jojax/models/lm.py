"""The causal language model: embedding → blocks → norm → head. One method trains, evaluates and streams.

Rows may hold several documents (`segment`); attention, path sums and restarts keep them apart. Streaming: call with
`capacity` (and `past` from the second chunk on); any split into chunks equals the whole.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from jojax.algebra import elements
from jojax.encodings import hooks
from jojax.encodings.base import Context, shards, wide
from jojax.errors import UserError
from jojax.losses import cross_entropy
from jojax.models import sharded, stack
from jojax.models.attention import EMPTY, Sites
from jojax.models.block import Spec


class Head(nn.Module):
    """Logits [B, L, V], or the loss of given targets in chunks of sites, so that long logits never stand whole."""

    spec: Spec
    bias: bool = True
    chunk: int = 512

    @nn.compact
    def __call__(self, x, table=None, targets=None):
        V = self.spec.dims.vocab
        if table is None:
            init = nn.initializers.normal(self.spec.init_std)
            kernel = sharded.vocabulary(self.param("kernel", init, (x.shape[-1], V)), 1)
        else:
            kernel = table.T
        bias = self.param("bias", nn.initializers.zeros, (V,)) if self.bias else jnp.zeros((V,))

        B, L, n = *x.shape[:2], shards()

        def logits(x):
            # plain matrices: the gradient is twice as fast on CPUs; but sites that are split stay an axis of their own
            rows = x if n > 1 else x.reshape(-1, x.shape[-1])
            y = jnp.matmul(rows, kernel.astype(x.dtype), preferred_element_type=wide(x.dtype))
            return (y + bias.astype(y.dtype)).reshape(*x.shape[:-1], V)

        if targets is None:
            return logits(x)

        if self.chunk * n >= L:
            return cross_entropy(logits(x), targets)

        @jax.checkpoint
        def nll(part):
            return cross_entropy(logits(part[0]), part[1])

        def cut(t):
            """[B, L, ...] -> [chunks, B, shards, chunk, ...]: at a time a chunk of every device's sites."""
            t = t.reshape(B, n, -1, *t.shape[2:])
            pad = [(0, 0)] * t.ndim
            pad[2] = (0, -t.shape[2] % self.chunk)
            t = jnp.pad(t, pad)
            return jnp.moveaxis(t.reshape(B, n, -1, self.chunk, *t.shape[3:]), 2, 0)

        out = jnp.moveaxis(lax.map(nll, (cut(x), cut(targets))), 0, 2)
        return out.reshape(B, n, -1)[:, :, : L // n].reshape(B, L)


class LM(nn.Module):
    spec: Spec
    encoding: Callable
    tied: bool = False
    head_bias: bool = True
    loss_chunk: int = 512
    scan: bool = True
    remat: bool = False

    @nn.compact
    def __call__(self, tokens, *, position=None, segment=None, targets=None, past=None, capacity=0, train=False):
        """tokens [B, L] int; position [B, L] (default: arrival); segment [B, L] int, the document (default: the row).

        -> logits [B, L, V] float32, or with targets [B, L] the loss of each in nats, [B, L];
        with `capacity` > 0 (sites that the cache holds; all chunks together must fit, which the caller sees to) a pair
        (that, past of the next chunk).
        Needs rngs 'dropout' and 'encoding' when train."""
        spec = self.spec
        dtype = jnp.dtype(spec.dtype)
        B, L = tokens.shape
        at = 0 if past is None else past["at"]
        if position is None:
            position = jnp.broadcast_to(at + jnp.arange(L), (B, L))
        document = jnp.broadcast_to(jnp.arange(B)[:, None], (B, L)) if segment is None else segment
        ctx = Context(
            position=position[..., None].astype(wide(dtype)),
            restart=restarts(document, past),
            segment=document,
            tokens=tokens,
            train=train,
        )
        arrival = at + jnp.arange(L)
        queries = keys = Sites(arrival, segment)
        if capacity:
            slots = jnp.full((B, capacity), EMPTY, document.dtype) if past is None else past["segment"]
            slots = lax.dynamic_update_slice_in_dim(slots, document, at, axis=1)
            queries, keys = Sites(arrival, document), Sites(jnp.arange(capacity), slots)
        init = nn.initializers.normal(spec.init_std)
        embed = nn.Embed(spec.dims.vocab, spec.dims.width, dtype=dtype, embedding_init=init, name="embed")
        encoding = self.encoding(name="encoding")
        if capacity and capacity < L:
            raise UserError(f"a cache of {capacity} sites cannot hold {L} tokens: raise capacity")
        if encoding.BOUNDED_LENGTH and capacity > spec.dims.length:
            raise UserError(f"this encoding ends at {spec.dims.length} positions; a cache of {capacity} is beyond it")
        table = sharded.vocabulary(embed.embedding, 0)
        x, shared, carry = hooks.begin(encoding, jnp.take(table.astype(dtype), tokens, axis=0), ctx)
        x = nn.Dropout(spec.dropout, deterministic=not train)(x)
        x, blocks = stack.run(
            self,
            sharded.lay((x, carry)),
            ctx,
            shared,
            (queries, keys),
            past=None if past is None else past["blocks"],
            at=at,
            capacity=capacity,
        )
        x = spec.make_norm("norm")(x)
        head = Head(spec, self.head_bias, self.loss_chunk, name="head")
        out = head(x, table if self.tied else None, targets)
        if not capacity:
            return out
        return out, {"blocks": blocks, "at": at + L, "last": document[:, -1:], "segment": slots}


def restarts(document, past):
    """[B, L] bool: where a document begins. The first site of a first chunk always does."""
    before = other = document[:, 0] - 1
    if past is not None:
        before = jnp.where(past["at"] == 0, other, past["last"][:, 0])
    return document != elements.shift(document, before, shards=shards())
