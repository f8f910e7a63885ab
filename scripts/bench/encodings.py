"""What encodings cost: time and memory over plain rope's, from one run on this machine.

    python scripts/bench/encodings.py [layers [--only NAME,NAME]] [steps] [rotation] [path] [--repeats 5]

- layers: one attention layer with every preset (or those of --only), forward and forward + backward: ViT-B (12 heads
  of 64, 14 × 14 patches and a class token) and causal (the same heads, 2,048 sites), batch 4, over rope's
  (rope_axial's) own and over none's
- steps: whole training steps of two language models (length_extrapolation's novels, width 128 and 2 blocks;
  wikipedia_lm, width 512 and 6 blocks), jo_fixed and jo_projected over rope, and of cifar100_vit_tiny, rope_axial_qkv
  over rope_axial_qk
- rotation: rotate q and k and score, of the ViT-B layer, as training does it
- path: grape_ap's blockwise sum against the dense form, at 2,048, 4,096 and 8,192 sites of one head
"""

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax import linen as nn  # noqa: E402

from configs.encodings import PRESETS, preset  # noqa: E402
from jojax import config, encodings, loop  # noqa: E402
from jojax.encodings.base import Context, Dims, Edge  # noqa: E402
from jojax.encodings.grape_ap import LogSigmoidStep  # noqa: E402
from jojax.errors import UserError  # noqa: E402
from jojax.models import attention  # noqa: E402
from jojax.models.attention import Sites  # noqa: E402
from jojax.models.block import Block, Spec  # noqa: E402
from jojax.models.scores import logits  # noqa: E402
from scripts.bench.timing import costs  # noqa: E402

VIT_B = functools.partial(Dims, heads=12, kv_heads=12, head_dim=64, width=768, depth=1)
TEXT = VIT_B(vocab=1000, length=2048)
VISION = VIT_B(axes=2, grid=(14, 14), causal=False)
BATCH = 4
ROTATIONS = {n: preset(n) for n in ("rope_axial", "rope_mixed", "comrope_ap", "comrope_ld", "liere")}
ROTATIONS["liere, blocks of 4"] = {**preset("liere"), "block": 4}


class Layer(nn.Module):
    """A block whose MLP has one unit: its attention layer, with the encoding's hooks."""

    spec: Spec
    encoding: Callable

    @nn.compact
    def __call__(self, x, ctx):
        encoding, at = self.encoding(name="encoding"), Sites(jnp.arange(x.shape[1]), None)
        x, shared, carry = encoding.begin(x, ctx)
        block = Block(self.spec, self.encoding, advances=False, name="block")
        return block((x, carry), (None, None), ctx, shared, (at, at), 0)[0][0]


def context(dims):
    """Sites of the training length or grid; images with a class token."""
    if dims.axes == 1:
        position = jnp.arange(dims.length)[:, None]
    else:
        position = jnp.stack(jnp.meshgrid(*map(jnp.arange, dims.grid), indexing="ij"), -1).reshape(-1, dims.axes)
        position = jnp.concatenate([position[:1] * 0, position])
    L = len(position)
    rows = lambda t: jnp.broadcast_to(t, (BATCH, *t.shape))  # noqa: E731
    return Context(
        position=rows(position.astype(jnp.float32)),
        restart=rows(jnp.arange(L) == 0),
        segment=jnp.broadcast_to(jnp.arange(BATCH)[:, None], (BATCH, L)),
        placed=None if dims.axes == 1 else rows(jnp.arange(L) > 0),
        tokens=jax.random.randint(jax.random.key(1), (BATCH, L), 0, dims.vocab) if dims.vocab else None,
    )


def layer(name, dims, backward, x, ctx):
    """(function, arguments) of a preset's layer."""
    spec = Spec(dims=dims, mlp_ratio=1 / dims.width)
    model = Layer(spec, encodings.build(preset(name), dims))
    params = jax.jit(model.init)({"params": jax.random.key(2)}, x, ctx)

    def forward(params, x, ctx):
        return jnp.asarray(model.apply(params, x, ctx)).sum()

    return (jax.grad(forward, (0, 1)) if backward else forward), (params, x, ctx)


def fitting(names, dims):
    out = []
    for name in names:
        try:
            encodings.build(preset(name), dims)
        except UserError:
            continue
        out.append(name)
    return out


def layers(repeats, names):
    for title, dims, base in (("ViT-B layer, 197 sites", VISION, "rope_axial"), ("causal, 2,048 sites", TEXT, "rope")):
        ctx = context(dims)
        x = jax.random.normal(jax.random.key(0), (*ctx.position.shape[:2], dims.width))
        fit = dict.fromkeys((base, "none", *fitting(names, dims)))
        of = [costs({n: layer(n, dims, backward, x, ctx) for n in fit}, repeats) for backward in (False, True)]
        print(f"\n{title}, batch {BATCH}\n| encoding | forward, over {base} | over none | ", end="")
        print(f"with backward, over {base} | over none | its memory, over {base} | over none |\n|" + 7 * " --- |")
        for name in fit:
            time = [c[name].seconds / c[other].seconds for c in of for other in (base, "none")]
            memory = [of[1][name].bytes / of[1][other].bytes for other in (base, "none")]
            print(f"| {name} | " + " | ".join(f"{ratio:.2f}" for ratio in time + memory) + " |", flush=True)


def steps(repeats):
    print("\nwhole training steps, over rope's\n| config | encoding | time | FLOPs |\n| --- | --- | --- | --- |")
    for file, batch_size, base, others in (
        ("length_extrapolation", 16, "rope", ("jo_fixed", "jo_projected")),
        ("wikipedia_lm", 4, "rope", ("jo_fixed", "jo_projected")),
        ("cifar100_vit_tiny", 32, "rope_axial_qk", ("rope_axial_qkv",)),
    ):
        functions = {}
        for name in (base, *others):
            c = config.load(f"{ROOT}/configs/{file}.py:encoding={name}")
            c.batch_size = batch_size
            run = loop.Run(c, name, "")
            now = run.fresh_state()
            batch = jax.tree.map(lambda t: jnp.ones(t.shape, t.dtype), run.abstract_batch())
            functions[name] = (lambda now, batch, run=run: run.step_fn(now, batch)), (now, batch)
        of = costs(functions, repeats)
        for name in others:
            time, flops = of[name].seconds / of[base].seconds, of[name].flops / of[base].flops
            print(f"| {file} | {name} | {time:.3f} | {flops:.3f} |", flush=True)


def rotate_and_score(encoding, q, k, ctx):
    """Logits [B, G, R, L, L] of queries and keys in the frames of a block."""
    _, shared, carry = encoding.begin(jnp.zeros((*q.shape[:2], encoding.dims.width)), ctx)
    frame = encoding.journey(shared, carry, ctx).frame.where(ctx.placed)
    return logits(frame.dual(q)[:, :, :, None], frame.apply(k), 0.125)


def rotation(repeats):
    """Training of the frames' parameters, queries and keys."""
    print(
        f"\nrotate and score, ViT-B layer, batch {BATCH}, over rope_axial\n| encoding | time with backward | memory |"
    )
    print("| --- | --- | --- |")
    ctx, functions = context(VISION), {}
    q, k = jax.random.normal(jax.random.key(0), (2, *ctx.position.shape[:2], 12, 64))
    for name, options in ROTATIONS.items():
        encoding = encodings.build(options, VISION)(parent=None)
        params = encoding.init({"params": jax.random.key(1)}, q, k, ctx, method=rotate_and_score)

        def loss(params, q, k, ctx, encoding=encoding):
            scores = encoding.apply(params, q, k, ctx, method=rotate_and_score)
            return (scores * scores).sum()

        functions[name] = jax.grad(loss, (0, 1, 2)), (params, q, k, ctx)
    of = costs(functions, repeats)
    base = of["rope_axial"]
    for name, cost in of.items():
        print(f"| {name} | {cost.seconds / base.seconds:.2f} | {cost.bytes / base.bytes:.2f} |", flush=True)


def path(repeats):
    print("\nGRAPE-AP, one head of 64, rank 8, forward and backward: blockwise over dense\n| sites | time | memory |")
    print("| --- | --- | --- |")
    for L in (2048, 4096, 8192):
        keys = jax.random.split(jax.random.key(0), 5)
        widths = (64, 64, 64, 8, 8)
        q, k, v, eq, ek = (jax.random.normal(key, (1, L, 1, w)) for key, w in zip(keys, widths, strict=True))
        at = Sites(jnp.arange(L), None)

        def loss(run, q, k, v, eq, ek, at=at):
            edge = Edge(eq, ek, LogSigmoidStep(), jnp.full(1, 0.25))
            return run(q[..., None, :], k, v, at, at, causal=True, scale=0.125, edge=edge, edge_key=ek).sum()

        pair = {
            run.__name__: (jax.grad(lambda *a, run=run: loss(run, *a), (0, 1, 2, 3, 4)), (q, k, v, eq, ek))
            for run in (attention.xla, attention.chunked)
        }
        dense, blocks = costs(pair, repeats).values()
        print(f"| {L:,} | {blocks.seconds / dense.seconds:.2f} | {blocks.bytes / dense.bytes:.4f} |", flush=True)


def main():
    parts: dict[str, Callable] = {"layers": layers, "steps": steps, "rotation": rotation, "path": path}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*parts, []])  # [] as without any
    parser.add_argument("--only", help="presets of `layers`")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    asked = given.parts or list(parts)
    if given.only and "layers" not in asked:
        parser.error("--only names presets of `layers`, which is not asked for")
    parts["layers"] = functools.partial(layers, names=given.only.split(",") if given.only else sorted(PRESETS))
    for part in asked:
        parts[part](given.repeats)


if __name__ == "__main__":
    main()
