"""Fused attention of accelerators, of the signature of `attention.xla`: O(L) memory, logits and softmax in float32.

cudnn: flash attention of NVIDIA GPUs, in bfloat16, through `jax.nn.dot_product_attention`. It counts queries and keys
from the same site on. Documents and two-sided windows go in as a mask, which has O(L²) entries (one for all heads):
cuDNN's packed layout is no public function, and its own statistics are O(documents · L).
splash: `jax.experimental.pallas.ops.tpu.splash_attention`, on TPUs. Which blocks meet is computed here, so that queries
may start at any site, known or not when compiling (a cache, a shard of a sequence), and none stands on the host.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jojax.encodings.base import wide
from jojax.models.scores import reach, visible

FUSED_FROM = 128  # queries; `auto` takes no kernel below, where its blocks are mostly padding
FAR = 2**30  # sites

compiled_for = jax.make_user_context()  # `with compiled_for("tpu"):` what is traced inside is for that platform


def platform():
    """Of the devices that what is traced now is compiled for: cpu, tpu, gpu (NVIDIA's), rocm, …"""
    name = compiled_for.value or jax.default_backend()
    if name == "gpu" and not compiled_for.value and "cuda" not in jax.devices()[0].client.platform_version:
        return "rocm"
    return name


def suited(q, k, v, query, key, long, *, causal, window, edge):
    """The kernel of `platform()` for arrays of these shapes, or None where it cannot or another way is better."""
    name = next((name for name, (where, _) in HOMES.items() if where == platform()), None)
    if name is None or q.shape[1] < FUSED_FROM or refusal(name, q, k, v, causal=causal, window=window, edge=edge):
        return None
    return None if name == "cudnn" and long and dense(query, key, causal, window) else name


def refusal(name, q, k, v, *, causal, edge, **_):
    """Why this kernel cannot do it, or None."""
    where, dtypes = HOMES[name]
    if platform() != where:
        return f"is for {'TPUs' if where == 'tpu' else 'NVIDIA GPUs'}, this is compiled for {platform()}"
    if edge is not None:
        return "cannot add this encoding's bias, which is no product of features"
    if q.dtype.name not in dtypes:
        return f"needs dtype = {' or '.join(dtypes)}"
    if name == "cudnn" and max(q.shape[-1], v.shape[-1]) > widest():
        return (
            f"takes heads up to {widest()} wide, here they are {max(q.shape[-1], v.shape[-1])} with the bias's features"
        )
    if name == "cudnn" and causal and q.shape[1] != k.shape[1]:
        return f"is for whole causal sequences, not for {q.shape[1]} queries among {k.shape[1]} keys"
    return None


def widest():
    """Head width that JAX lets cuDNN take. It asks a GPU that is here: where there is none (a preflight), it refuses
    more than 128 whatever the chip takes, and so must we."""
    device = jax.local_devices()[0]
    return 256 if device.platform == "gpu" and float(device.compute_capability) >= 9 else 128


def dense(query, key, causal, window):
    """Does cuDNN need a mask?"""
    return (query.segment is not None and key.segment is not None) or (window and not causal)


def cudnn(q, k, v, query, key, *, causal, scale, window=0, edge=None, edge_key=None, implementation="cudnn"):
    """Widths are padded to one multiple of 8 and lengths to even ones: JAX trains with no others."""
    (B, Lq, G, R, D), Lk, E = q.shape, k.shape[1], v.shape[-1]
    mask = q_length = k_length = None
    if dense(query, key, causal, window):
        mask = padded(visible(query, key, causal, window)[:, None], (1, 1, 2, 2))
    elif Lk % 2 and not causal:  # else nobody sees the key that fills up
        q_length, k_length = jnp.full(B, Lq, jnp.int32), jnp.full(B, Lk, jnp.int32)
    q, k, v = (padded(t, (1, 2, 1, padded_size(max(D, E), 8))) for t in (q.reshape(B, Lq, G * R, D), k, v))
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=mask,
        scale=scale,
        is_causal=causal,
        query_seq_lengths=q_length,
        key_value_seq_lengths=k_length,
        local_window_size=(window - 1, 0) if window and causal else None,
        implementation=implementation,
    )
    if mask is not None:
        out = jnp.where(mask[:, 0].any(-1)[..., None, None], out, 0)  # a row that sees nothing
    return out[:, :Lq, :, :E].reshape(B, Lq, G, R, E)


def splash(q, k, v, query, key, *, causal, scale, window=0, edge=None, edge_key=None, interpret=False):
    """Lengths are padded to multiples of blocks. A sink, far below all logits and far above those of hidden keys, takes
    the whole weight of a row that sees nothing, and none of others'."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as pallas
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

    (B, Lq, G, R, D), Lk = q.shape, k.shape[1]
    size_q, size_k = block_size(Lq), block_size(Lk)
    blocks_q, blocks_k = -(-Lq // size_q), -(-Lk // size_k)
    back, ahead = (FAR if n is None else n for n in reach(causal, window))
    offset = (query.index[0] - key.index[0]).astype(jnp.int32)
    index = offset + jnp.arange(blocks_q * size_q, dtype=jnp.int32)
    by_query = meeting(blocks_q, size_q, offset, blocks_k, size_k, back, ahead)
    by_key = (t.T for t in meeting(blocks_k, size_k, -offset, blocks_q, size_q, ahead, back))
    rows, columns = (MaskInfo(number[None], None, met[None], None, index) for number, met in (by_query, by_key))
    mask_value = pallas.DEFAULT_MASK_VALUE
    kernel: Any = pallas.SplashAttentionKernel(
        rows,
        rows,
        columns,
        block_sizes=pallas.BlockSizes(*(size_q, size_k, size_k) * 2, size_q, size_k),
        is_mqa=False,
        save_residuals=False,
        mask_value=mask_value,
        attn_logits_soft_cap=None,
        residual_checkpoint_name=None,
        mask_function=Seen(*reach(causal, window), Lk),
        interpret=interpret,
    )
    segments = None
    if query.segment is not None and key.segment is not None:
        segments = pallas.SegmentIds(padded(query.segment, (1, size_q)), padded(key.segment, (1, size_k)))
    q = jnp.moveaxis(padded(scaled(q, scale).reshape(B, Lq, G * R, D), (1, size_q, 1, 1)), 2, 1)
    k, v = (jnp.moveaxis(padded(t, (1, size_k, 1, 1)), 2, 1) for t in (k, v))
    sinks = jnp.full(G * R, mask_value / 2, jnp.float32)
    out = jax.vmap(lambda *row: kernel(*row, sinks))(q, k, v, segments)
    return jnp.moveaxis(out, 1, 2)[:, :Lq].reshape(B, Lq, G, R, -1)


@dataclasses.dataclass(frozen=True)
class Seen:
    """splash's mask, of sites counted from the first key on; static and hashable."""

    back: int | None
    ahead: int | None
    keys: int  # behind them is padding; causal queries are among them

    def __call__(self, query, key):
        rules: list[Any] = [] if self.back is None else [key >= query - self.back]
        rules += [] if self.ahead is None else [key <= query + self.ahead]
        rules += [key < self.keys] if self.ahead != 0 else []
        return functools.reduce(jnp.logical_and, rules)


def meeting(blocks, size, offset, others, other_size, back, ahead):
    """Numbers of the blocks of the other side that each block of this side meets, [blocks, width], and whether it does,
    in the smallest type: they stand in a TPU's scalar memory. `offset`: where this side starts on the other's count."""
    start = offset + size * jnp.arange(blocks, dtype=jnp.int32)[:, None]
    first = jnp.maximum(start - back, 0) // other_size
    last = jnp.minimum(start + size - 1 + ahead, others * other_size - 1) // other_size
    width = min(others, (size + back + ahead - 2) // other_size + 2)
    number = first + jnp.arange(width, dtype=jnp.int32)
    small = jnp.int8 if others < 128 else jnp.int16
    return jnp.maximum(jnp.minimum(number, last), 0).astype(small), (number <= last).astype(small)


def block_size(length):
    return max(size for size in (128, 256, 512) if padded_size(length, 128) % size == 0)


def padded_size(n, multiple):
    return -(-n // multiple) * multiple


def padded(t, multiples):
    """With zeros, every axis to a multiple."""
    return jnp.pad(t, [(0, -n % multiple) for n, multiple in zip(t.shape, multiples, strict=True)])


def scaled(q, scale):
    return (q.astype(wide(q.dtype)) * scale).astype(q.dtype)


KERNELS = {"cudnn": cudnn, "splash": splash}
HOMES = {"cudnn": ("gpu", ("bfloat16",)), "splash": ("tpu", ("bfloat16", "float32"))}
