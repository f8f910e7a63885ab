"""Where trained models lie on the plane of the value path, c_k = Σ_j α_kj P_{j→k} v_j: selection against composition.

    python scripts/draw_plane.py runs/A runs/B … [--out results/plots/value_path.png]

selection: how far the weights α depend on content: ½ Σ_j |α_kj − α'_kj| of two texts at equal positions. 0 = the same
    whatever the text says, as in a linear recurrence, whose α is 1; 1 = they look at other places
composition: how far what arrives differs from what was sent: root mean square of ‖P v − v‖ / 2‖v‖ over all v and pairs
    of sites. 0 = values stay; a half turn is 1, a value that has faded away is ½
of it by content: likewise ‖P v − P' v‖ / 2‖v‖ of two texts at equal positions

Means over blocks, heads, ROWS held-out rows of the training length and PAIRS pairs j < k. Language models of
jojax.train, attention or recurrence. Prints a table; writes the PNG and, beside it, the numbers as JSON.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jojax import coherence, diagnostics, evaluate, task  # noqa: E402 — the repository's own package, installed or not
from jojax.errors import UserError  # noqa: E402
from jojax.models.recurrence import Recurrence  # noqa: E402

ROWS, PAIRS = 6, 256


def root_mean(x):
    return float(np.sqrt(np.mean(np.square(x))))


def apart(table):
    """[B, …] -> the differences of all pairs of rows."""
    return np.array([table[a] - table[b] for a, b in itertools.combinations(range(len(table)), 2)])


def measured(alpha, P):
    """alpha [B, H, k, j] or None, P [B, pairs, G, D, D] -> {selection, composition, by_content} of a block.

    The mean of ‖M v‖² over all unit v is ‖M‖²_F / D."""
    size = np.sqrt(P.shape[-1])
    frobenius = lambda M: np.linalg.norm(M, axis=(-2, -1)) / size / 2  # noqa: E731
    return {
        "selection": 0.0 if alpha is None else float(np.abs(apart(alpha)).sum(-1).mean() / 2),
        "composition": root_mean(frobenius(P - np.eye(P.shape[-1]))),
        "by_content": root_mean(frobenius(apart(P))),
    }


def pairs(length):
    rng = np.random.default_rng(0)
    k = rng.integers(1, length, PAIRS)
    return rng.integers(0, k), k


def of_attention(job, params, batch):
    for number, (ctx, journey) in enumerate(coherence.watch(job, params, batch)):
        alpha = np.asarray(diagnostics.weights(job, params, number, ctx, journey), float)
        (B, _, G, D), (j, k) = ctx.k.shape, pairs(ctx.k.shape[1])
        if journey.value_frame is None:
            P = np.broadcast_to(np.eye(D), (B, PAIRS, G, D, D))
        else:
            basis = coherence.probes(jnp.eye(D), ctx)
            A = np.moveaxis(np.asarray(jax.vmap(journey.value_frame.apply)(basis), float), 0, -1)  # [B, L, G, D, D]
            P = np.linalg.solve(A[:, k], A[:, j])
        yield measured(alpha, P)


def of_recurrence(job, params, batch):
    """P_{j→k} = a_k … a_{j+1}, diagonal."""
    inputs = []

    def look(following, args, kwargs, call):
        if isinstance(call.module, Recurrence) and call.method_name == "__call__":
            jax.debug.callback(lambda x: inputs.append(np.array(x, float)), args[0], ordered=True)
        return following(*args, **kwargs)

    coherence.forward(job, params, batch, look)
    decay = params["blocks"]["recurrence"]["decay"]
    for number, x in enumerate(inputs):
        raw = np.einsum("blc,chd->blhd", x, decay["kernel"][number]) + decay["bias"][number]
        through = -np.logaddexp(0, -raw).cumsum(1)  # Σ log a
        j, k = pairs(x.shape[1])
        P = np.exp(through[:, k] - through[:, j])
        yield measured(None, P[..., None] * np.eye(P.shape[-1]))


def of_run(workdir):
    _, config, job, params, _ = evaluate.restore(workdir)
    if job.unit != "tokens" or isinstance(job, task.Probe):
        raise UserError(f"{workdir} is no run on text: the plane is drawn for language models")
    params = jax.device_get(params)
    batch = coherence.held_out_batch(job, config.data.length, ROWS)
    recurrent = config.model.mixer == "recurrence"
    blocks = list((of_recurrence if recurrent else of_attention)(job, params, batch))
    name = "recurrence" if recurrent else task.label(config)
    return name, {key: float(np.mean([b[key] for b in blocks])) for key in blocks[0]} | {"run": Path(workdir).name}


def named(found, workdirs):
    """{label: row}; where several runs have one, the workdir beside it."""
    labels = [label for label, _ in found]
    pairs = zip(found, workdirs, strict=True)
    return {label if labels.count(label) == 1 else f"{label}, {workdir}": row for (label, row), workdir in pairs}


def draw(found, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 5), layout="constrained")
    share = [row["by_content"] / row["composition"] if row["composition"] else 0 for row in found.values()]
    x, y = ([row[key] for row in found.values()] for key in ("selection", "composition"))
    points = axis.scatter(x, y, c=share, cmap="viridis", vmin=0, vmax=max(1, *share), s=60, edgecolors="black")
    for name, a, b in zip(found, x, y, strict=True):
        axis.annotate(name, (a, b), xytext=(6, 5), textcoords="offset points", fontsize=9)
    figure.colorbar(points, label="of it by content, over composition")
    axis.set(
        xlabel="selection: weights that depend on content", ylabel="composition: what happens to values on the way"
    )
    axis.set(xlim=(-0.05, 1.05), ylim=(-0.05, 1.05), title="The value path of trained models")
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workdirs", nargs="+", help="finished runs of language models")
    parser.add_argument("--out", default="value_path.png", help="the PNG")
    args = parser.parse_args()
    found = named([of_run(workdir) for workdir in args.workdirs], args.workdirs)
    print("| model | selection | composition | of it by content |\n| --- | --- | --- | --- |")
    for name, row in found.items():
        print(f"| {name} | {row['selection']:.3f} | {row['composition']:.3f} | {row['by_content']:.3f} |")
    out = Path(args.out)
    draw(found, out)
    out.with_suffix(".json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    print(f"plot: {out}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
