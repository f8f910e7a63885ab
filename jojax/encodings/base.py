"""The contract of an encoding: what it may look at (Context), what it answers (Journey), and its hooks (Encoding).

One attention formula serves every encoding (`jojax.models.attention`):

    c_k = Σ_j softmax_j(q_kᵀ P_{j→k} k_j /√d + b_kj) P_{j→k} v_j,      P_{j→k} = A_k⁻¹ A_j

so an encoding never touches q, k or v. It says for every site what the frame A_i is, whether values travel
through it, and what bias the path adds.

Shapes: B rows, L sites, A coordinate axes, H query heads, G key heads (G divides H; one frame serves the H/G
query heads of its group), D head width, C model width.
"""

import dataclasses
from typing import Any, ClassVar, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from jojax.algebra import elements
from jojax.errors import UserError


@struct.dataclass
class Context:
    """All that an encoding may look at. `prefix` is what this block's encoding handed on after the tokens before
    this chunk; use it through `path_sum` (a restart forgets it), so that zeros start a sequence."""

    position: Any  # [B, L, A] float32 or wider: coordinates, explicit data
    restart: Any  # [B, L] bool: a document starts here
    segment: Any  # [B, L] int32: the document's number (-1 = padding)
    placed: Any = None  # [B, L] bool; False = a token without a place (class token); None = all have one
    tokens: Any = None  # [B, L] int32
    residual: Any = None  # [B, L, C] the block's input before its norm
    x: Any = None  # [B, L, C] the block's normalised input
    q: Any = None  # [B, L, H, D] before transport, after QK-norm where there is one
    k: Any = None  # [B, L, G, D] likewise
    prefix: Any = None
    train: bool = struct.field(pytree_node=False, default=False)


class Step(Protocol):
    """One block of an edge's bias; a frozen dataclass, so that it is static and hashable under jit. It counts heads in
    what it is given: where heads are split (`mesh.tensor`), H and G are a device's own, in the weights too."""

    def __call__(self, state, query, key, visible, weights) -> tuple:
        """(state [B,H,Lq], query [B,Lq,H,r], key block [B,Lk,G,s], visible [B,Lq,Lk], weights of the edge)
        -> bias [B or 1,H,Lq,Lk], state."""


@struct.dataclass
class Edge:
    """A bias that is no low-rank lift: a sum over the path, or a function of the pair. Key blocks run last to first,
    the state (of path sums) starts at zero."""

    query: Any  # [B, L, H, r]; what `step` alone reads may have one head, or one row for all
    key: Any  # [B, L, G, s], cached beside the keys; likewise
    step: Step = struct.field(pytree_node=False)
    weights: Any = None  # a tree of what `step` reads beside them; the last axis of each is heads, or 1 for all


@struct.dataclass
class Journey:
    """What an encoding answers, in every block."""

    frame: Any = None  # A for queries (dual) and keys (apply)
    value_frame: Any = None  # A for values; None = values stay
    lift: Any = None  # (query [B,L,H,r], key [B,L,G,r]): b_kj = Σ_r query_k key_j, float32 or wider
    edge: Edge | None = None
    prefix: Any = None  # state after this chunk
    restore: bool = struct.field(pytree_node=False, default=True)  # bring the values home: A_k⁻¹ before the output
    temperature: float = struct.field(pytree_node=False, default=1.0)  # divides q·k, not the biases


@dataclasses.dataclass(frozen=True)
class Dims:
    """The model's sizes, as an encoding sees them."""

    heads: int
    kv_heads: int
    head_dim: int
    width: int
    depth: int
    axes: int = 1
    vocab: int = 0  # 0 = the model has no tokens
    length: int = 0  # training length in sites (text); bounds tables
    grid: tuple[int, ...] = ()  # of the images (vision); bounds tables
    trained: tuple[int, ...] = ()  # grid of the training, by which coordinates are scaled; () = grid
    causal: bool = True

    def __post_init__(self):
        object.__setattr__(self, "trained", self.trained or self.grid)
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise UserError(f"model.kv_heads = {self.kv_heads} must divide model.heads = {self.heads}")


class Encoding(nn.Module):
    """Base of all encodings, itself the encoding that adds nothing. Subclasses' fields are the options.

    Hooks are `@nn.compact`; give every submodule and parameter in a hook its own `name` (automatic names restart
    in each hook and would be silently shared). Parameters made in `advance` must have names that start with
    "advance": the last block advances to nobody, and the model does not store them for it.
    """

    dims: Dims
    dtype: Any = jnp.float32

    # Claims of an instance (a property where options decide); `python -m jojax.laws NAME` verifies them.
    RELATIVE = True  # logits depend on differences of coordinates only (between sites that have a place)
    NORM_PRESERVING = True  # frames are orthogonal
    CAUSAL_ONLY = False  # needs an order: refused in an encoder
    BOUNDED_LENGTH = False  # has no answer beyond the training length or grid
    STREAMS = True  # chunks with the prefix handed on equal the whole
    FLAT = True  # the journey between two sites does not depend on what lies between them

    STARTS_AS = None  # config.encoding of what it equals until its parameters are trained

    CHOICES: ClassVar[dict[str, tuple]] = {}  # option -> its valid values

    def check(self):
        """UserError for options that are unknown or do nothing together; called when a model is built."""
        for option, valid in self.CHOICES.items():
            value = getattr(self, option)
            if value not in valid:
                raise UserError(f"encoding.{option} = {value!r}: choose from {', '.join(map(str, valid))}")
        for option, use in self.idle().items():
            value = getattr(self, option)
            if value != type(self).__dataclass_fields__[option].default:
                raise UserError(f"encoding.{option} = {value!r} does nothing here: it is for {use}")
        if self.CAUSAL_ONLY and not self.dims.causal:
            raise UserError(f"encoding {type(self).__name__} needs an order: use it in a causal model")

    def idle(self) -> dict[str, str]:
        """{option: what it is for}, of options that nothing reads beside the others; setting one is refused."""
        return {}

    def begin(self, x, ctx):
        """Once, before the blocks: x [B, L, C], Context -> x, shared, carry.

        shared: read by all blocks; carry: changes from block to block; both pytrees of arrays or None."""
        return x, None, None

    def journey(self, shared, carry, ctx) -> Journey:
        """In every block, with the block's normalised input, queries and keys in the context."""
        return Journey()

    def generators(self):
        """[A, G, m, b, b] skew, of frames exp(Σ_a u_a A_a) in m blocks, u the coordinates; what `fold` reads."""
        raise UserError(
            f"{type(self).__name__} has no frames exp(Σ u A) with constant generators A in learned planes: "
            "nothing folds into plain rope"
        )

    @nn.compact
    def group(self):
        """`generators` from outside."""
        return self.generators()

    def advance(self, shared, carry, hidden, ctx):
        """After a block's MLP; hidden [B, L, F] is its activation. -> the carry of the next block."""
        return carry


class Rotary(Encoding):
    """Base of the encodings with frames; `transport` says what travels through them."""

    transport: str = "qk"  # qk | qkv | v | none

    CHOICES: ClassVar[dict[str, tuple]] = {"transport": ("qk", "qkv", "v", "none")}

    def check(self):
        super().check()
        if self.dims.head_dim % 2:
            raise UserError(f"model.head_dim = {self.dims.head_dim}: rotary encodings pair dimensions, make it even")

    def travel(self, frame, value_frame=None, **rest) -> Journey:
        """The journey over queries and keys, values (through `value_frame` or the same frame), both or neither."""
        return Journey(
            frame=frame if "qk" in self.transport else None,
            value_frame=(value_frame or frame) if "v" in self.transport else None,
            **rest,
        )


def wide(dtype):
    """The dtype for angles, sums and gates: at least float32, float64 stays."""
    return jnp.promote_types(dtype, jnp.float32)


def shards() -> int:
    """In how many parts the sites of a row lie on the devices: `mesh.sequence` where a step is traced in a mesh."""
    return jax.sharding.get_abstract_mesh().shape.get("sequence", 1)


def path_sum(step, ctx: Context, add=jnp.add, zero=0.0):
    """Sums along the path, within documents, going on from `ctx.prefix`.

    step [B, L, ...] -> exclusive [B, L, ...], inclusive [B, L, ...], last [B, ...]; at least float32.
    `add` combines two partial sums (earlier, later); `zero` adds nothing."""
    return elements.prefix(step, add, zero, axis=1, restart=ctx.restart, initial=ctx.prefix, shards=shards())
