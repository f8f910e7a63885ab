"""What attention does in the runs of a table (`diagnostics` of their records): one picture, first seed of every row."""

import numpy as np


def found(rows, label):
    """{label: (blocks, protocol)} of the rows whose first run has diagnostics of attention."""
    first = {label(row): seeds[min(seeds)].get("diagnostics") for row, seeds in rows.items()}
    return {name: (d["blocks"], d["protocol"]) for name, d in first.items() if d and d["blocks"]}


def by_block(blocks, key):
    """The mean over heads, of every block that has it: x, y"""
    there = [(n, np.mean(block[key])) for n, block in enumerate(blocks, 1) if key in block]
    return [n for n, _ in there], [y for _, y in there]


def of_steps(blocks):
    """Mean over blocks and heads of |mean| and std of the step angles, by plane."""
    steps = [block["steps"] for block in blocks if "steps" in block]
    return [np.mean([np.abs(s[key]).mean(0) for s in steps], 0) for key in ("mean", "std")] if steps else None


def of_values(blocks):
    """The last block: distance, mean over heads."""
    block = blocks[-1].get("values")
    return block and (block["distance"], np.mean(block["alike"], 0))


def plot(runs, path):
    """runs: as `found` answers -> PNG path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    (entropy, far), (turns, values) = axes
    beyond = "beyond" if any("beyond" in block for blocks, _ in runs.values() for block in blocks) else "reach"
    for n, (name, (blocks, _)) in enumerate(runs.items()):
        style = dict(color=f"C{n % 10}", marker="o" if n < 10 else "s", markersize=4, label=name)
        entropy.plot(*by_block(blocks, "entropy"), **style)
        far.plot(*by_block(blocks, beyond), **style)
        if (steps := of_steps(blocks)) is not None:
            mean, std = steps
            turns.plot(np.maximum(mean, 1e-6), "-", color=style["color"], label=name)
            turns.plot(np.where(std > 1e-5, std, np.nan), ":", color=style["color"])
        if curve := of_values(blocks):
            values.plot(*curve, color=style["color"], label=name)
    entropy.set(title="entropy of the weights, 1 = uniform", xlabel="block", ylim=(0, 1.05))
    length, trained = (next(iter(runs.values()))[1][key] for key in ("length", "training_length"))
    texts = f"weight on keys further than the {trained} trained sites, at {length} sites"
    far.set(title=texts if beyond == "beyond" else "mean distance attended to", xlabel="block", ylim=(0, None))
    turns.set(title="step angles: |mean| (solid) and spread (dotted)", xlabel="plane", ylabel="radians")
    if turns.lines:
        turns.set_yscale("log")
    values.set(
        title="values that many sites share: what a distance leaves, last block", xlabel="distance", ylim=(0, 1.05)
    )
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.title.set_fontsize(10)
    for axis in (entropy, far):
        axis.xaxis.get_major_locator().set_params(integer=True)
    for axis in (entropy, turns, values):
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
