"""What an encoding does, in one picture: `python -m jojax.show NAME`, a preset before training, in a small text model
or, where it does not fit text, one of images; `--config configs/FILE.py:arg [--config.encoding.x=v]`, a config's; or
`--workdir DIR`, that of a run, on held-out data. [--length SITES] [--block N] [--out FILE.png]

Four panels, each says what to see: how well a key that equals the query still matches at a distance, what the path adds
to the logit, what is left of a value that many sites share, and the operators themselves. `jojax.coherence` has the
definitions.
"""

import sys
from pathlib import Path

import jax
import numpy as np
from absl import flags

from jojax import cli, coherence, config, evaluate, task
from jojax.encodings.frames import PlaneFrame
from jojax.errors import UserError
from jojax.models import build

ROWS, POINTS, LENGTH = 4, 64, 256


def random_batch(job, length):
    """Rows without meaning, for a model before training."""
    rng = np.random.default_rng(0)
    if job.unit != "tokens":
        image = rng.normal(size=(ROWS, *job.size, 3)).astype(np.float32)
        return {"image": image, "label": np.zeros(ROWS, int), "weight": np.ones(ROWS)}
    tokens = rng.integers(0, job.config.data.vocab, (ROWS, length))
    row, at = np.indices(tokens.shape)
    return {"tokens": tokens, "targets": tokens, "position": at, "segment": row, "weight": np.ones(tokens.shape)}


# --------------------------------------------------------------------------------- the picture
def curves(axis, x, table, style="-", label="head"):
    """One line a head; one for all where they are equal."""
    from matplotlib import pyplot as plt

    same = np.allclose(table, table[:1], atol=1e-4)
    for h, row in enumerate(table[:1] if same else table):
        name = "all heads" if same else f"{label} {h + 1}"
        color = "black" if same else plt.get_cmap("viridis")(0.9 * h / len(table))
        axis.plot(x, row, style, color=color, label=name if style == "-" else None, linewidth=1.4)


def say(axis, question, answer, ylabel, ylim=None):
    axis.set_title(f"{question}\n{answer}", fontsize=9)
    axis.set(ylabel=ylabel, ylim=ylim)


def draw_match(axis, frame, ctx, d, added, real):
    answer, ylabel = "1: as at its own place, 0: no more than any other", "tr P / D"
    if frame is not None:
        curves(axis, *coherence.by_distance(coherence.match(frame, ctx), d))
    elif added is not None:
        curves(axis, *coherence.by_distance(coherence.cosines(added), d))
        answer, ylabel = "keys do not travel; the curve is the cosine of what two sites get added", "cosine"
    else:
        axis.axhline(1, color="black")
        answer = "yes, at every distance: keys do not travel"
    if real:
        curves(axis, *coherence.by_distance(coherence.real_match(frame, ctx), d), ":")
        answer += "; dotted: mean cosine of this run's q and P k"
    say(axis, "Does a key that equals the query still match at a distance?", answer, ylabel)
    axis.set_ylim(min(-0.05, axis.get_ylim()[0]), max(1.05, axis.get_ylim()[1]))


def draw_bias(axis, table, d):
    question, ylabel = "What does the path add to the logit?", "b_kj − b_kk (nats)"
    if table is None:
        axis.axhline(0, color="black")
        return say(axis, question, "nothing: far and near keys are told apart by their match alone", ylabel, (-1, 1))
    curves(axis, *coherence.by_distance(table, d))
    return say(axis, question, "below 0: a key counts less, whatever it holds (a factor of e for each nat)", ylabel)


def draw_values(axis, journey, ctx, d):
    question, ylabel = "How much of a value that many sites share is left in their mean?", "‖mean of P v‖ for ‖v‖ = 1"
    if journey.value_frame is None:
        axis.axhline(1, color="black")
        return say(axis, question, "all: values stay as they are", ylabel, (0, 1.1))
    x = coherence.some_of(coherence.often(d), POINTS)
    alike, up_to = coherence.of_values(journey, ctx, d, x)
    curves(axis, x, alike)
    curves(axis, x, up_to, "--")
    answer = "solid: mean over all pairs at one distance (1: turned alike); dashed: over all sites up to it"
    return say(axis, question, answer, ylabel, (0, max(1.1, 1.1 * alike.max())))


def draw_operators(figure, axis, frame, ctx, table, added, text):
    """Angles of the first head, else its biases, else what is added, as an image."""
    site = "position" if text else "site: patches row by row, after the class token where there is one"
    if isinstance(frame, PlaneFrame):
        image = np.angle(np.exp(1j * np.asarray(frame.angles[0, :, 0], float))).T
        labels, how = (site, "plane", "radians"), dict(cmap="twilight", vmin=-np.pi, vmax=np.pi)
        title = "What is its frame?\nangles, first head: planes that flicker tell near sites apart, slow ones far sites"
    elif frame is not None:
        image = coherence.eigen_angles(frame, ctx, text)
        labels, how = (site, "eigen-angle, by size", "radians"), dict(cmap="viridis", vmin=0)
        what = "of the step to the next site" if text else "at every site, from 0 to π"
        title = f"What is its frame?\nthe eigen-angles of the operator {what}, first head"
    elif table is not None:
        image = np.where(np.tri(len(table[0])) > 0, table[0], np.nan) if text else table[0]
        labels, how = ("key j", "query k", "nats"), dict(cmap="viridis")
        title = "What is its bias?\nof the first head, for every pair"
    elif added is not None:
        image, most = added.T, np.abs(added).max()
        labels, how = (site, "channel", ""), dict(cmap="RdBu", vmin=-most, vmax=most)
        title = "What does it add to the embedding?\nevery site has its own pattern"
    else:
        axis.set_axis_off()
        return axis.text(0.5, 0.5, "nothing travels, nothing is added", ha="center", transform=axis.transAxes)
    shown = axis.imshow(image, aspect="auto", interpolation="nearest", **how)
    figure.colorbar(shown, ax=axis, label=labels[2])
    axis.set_title(title, fontsize=9)
    return axis.set(xlabel=labels[0], ylabel=labels[1])


def draw(job, params, pair, title, path, real):
    """One block's (Context, Journey) as a PNG. -> its path"""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    (ctx, journey), causal, text = pair, job.model.spec.dims.causal, job.unit == "tokens"
    d, table = coherence.distances(ctx, causal), coherence.bias(journey, ctx, causal)
    often, added = coherence.often(d), coherence.added(job, params, ctx)
    figure, axes = plt.subplots(2, 2, figsize=(13, 8), layout="constrained")
    figure.suptitle(title)
    draw_match(axes[0, 0], journey.frame, ctx, d, added, real)
    draw_bias(axes[0, 1], table, d)
    draw_values(axes[1, 0], journey, ctx, d)
    frame = journey.value_frame if journey.frame is None else journey.frame
    draw_operators(figure, axes[1, 1], frame, ctx, table, added, text)
    for axis in (*axes[0], axes[1, 0]):
        axis.set(xlabel="distance k − j (tokens)" if text else "distance (patches)", xlim=(0, often[-1]))
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8, ncols=2)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


# --------------------------------------------------------------------------------- command
def show(settings=None, *, workdir=None, length=0, block=-1, out=None):
    """Draw the encoding of a config (before training), or of the run in `workdir`. -> the path of the PNG"""
    if (settings is None) == (workdir is None):
        raise UserError("give a preset's name or --config (before training), or --workdir (a run), one of them")
    if workdir is not None:
        result, settings, job, params, _ = evaluate.restore(workdir)
        job.check_data(result.get("data"), f"{workdir} was trained and evaluated with: put it back")
    assert settings is not None
    job = task.make(settings)
    dims, bounded = job.model.spec.dims, job.model.encoding(parent=None).BOUNDED_LENGTH
    if job.unit != "tokens" and length:
        raise UserError(f"--length={length} is for language models; an image has the sites of its grid")
    if job.unit == "tokens" and bounded and length > dims.length:
        raise UserError(f"--length={length}: this encoding is a table of {dims.length} positions; give fewer")
    if not -dims.depth <= block < dims.depth:
        raise UserError(f"--block={block}: the model has {dims.depth}, counted from 0, or backwards from -1")
    wanted = length or (dims.length if bounded else LENGTH)
    name, state = task.label(settings), "before training"
    if workdir is None:
        params, batch = jax.jit(job.init)(jax.random.key(settings.seed)), random_batch(job, wanted)
    else:
        state, batch = str(workdir), coherence.held_out_batch(job, wanted, ROWS)
        if length and batch["tokens"].shape[1] < length:
            raise UserError(
                f"--length={length}: the longest held-out document has {batch['tokens'].shape[1]} predictions"
            )
    params = jax.device_get(params)
    pair = coherence.watch(job, params, batch)[block]
    title = f"{name}, {state}: block {range(dims.depth)[block] + 1} of {dims.depth}, {dims.heads} heads"
    default = f"{name}.png" if workdir is None else Path(workdir) / "encoding.png"
    return draw(job, params, pair, title, out or default, workdir is not None)


def spec_of(name):
    """A config of a small model that the preset fits: of text, else of images."""
    specs = [f"configs/{file}.py:encoding={name}" for file in ("quickstart", "cifar100_vit_tiny")]
    errors = []
    for spec in specs:
        try:
            build.build(config.load(spec))
            return spec
        except UserError as error:
            errors.append(error)
    raise errors[0]


def main(_):
    FLAGS = flags.FLAGS
    if FLAGS.preset and FLAGS.config is not None:
        raise UserError(f"give either {FLAGS.preset} or --config, which names its encoding itself")
    cli.keep_compiled()
    settings = config.load(spec_of(FLAGS.preset)) if FLAGS.preset else FLAGS.config and cli.parsed_config()[0]
    print("plot:", show(settings, workdir=FLAGS.workdir, length=FLAGS.length, block=FLAGS.block, out=FLAGS.out))


if __name__ == "__main__":
    cli.define_config(required=False)
    flags.DEFINE_string("preset", None, "a preset of configs/encodings.py; may stand in front without --preset=")
    flags.DEFINE_string("workdir", None, "a run's folder, instead of a config")
    flags.DEFINE_integer("length", 0, "sites of a row of text; 0: 256, or what the encoding has", lower_bound=0)
    flags.DEFINE_integer("block", -1, "which block, from 0; -1: the last")
    flags.DEFINE_string("out", None, "the PNG; default NAME.png, or encoding.png in the run's folder")
    named = len(sys.argv) > 1 and not sys.argv[1].startswith("-")
    cli.run_main(main, [sys.argv[0], f"--preset={sys.argv[1]}", *sys.argv[2:]] if named else None)
