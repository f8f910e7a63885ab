"""Loss beyond the training length: the same tokens scored with windows of every length.

Windows lie inside documents. Disjoint: of each document the first floor(n/longest)·longest predictions, cut into
windows of each length, so that only the context differs. Sliding: every prediction of every document once, with
length − stride to length tokens of context, fewer only where a document begins. The tail is the last training-length
predictions of a window: a mean over all positions mixes "more context helps" with "far positions fail".
"""

import math

import jax
import numpy as np
from jax.experimental import multihost_utils

from jojax import shard, task
from jojax.data import windows
from jojax.data.stream import eval_batches
from jojax.errors import UserError

BINS = 64  # of the loss by position


def window_sets(job, lengths, stride=0):
    """({length: windows of the valid split, or a probe's rows}, [lengths beyond the encoding's table]).

    UserError: nothing is left to score, lengths that do not divide the largest, or no document is long enough."""
    trained = job.config.data.length
    bounded = job.model.encoding(parent=None).BOUNDED_LENGTH
    refused = sorted({n for n in lengths if bounded and n > trained})
    lengths = sorted(set(lengths) - set(refused))
    if not lengths:
        raise UserError(
            f"encoding {task.label(job.config)} is a table of {trained} positions and has no answer at {refused[0]}: "
            f"evaluate it at lengths up to {trained}"
        )
    if isinstance(job, task.Probe):
        if stride:
            raise UserError("--stride slides windows over text; a probe has rows of its own")
        return {n: job.rows("valid", n) for n in lengths}, refused
    text, most = job.corpus("valid"), job.config.eval.document_tokens
    if stride:
        return {n: windows.sliding_windows(text, n, stride, most) for n in lengths}, refused
    return windows.common_windows(text, lengths, most), refused


def evaluate_lengths(job, params, mesh, lengths, *, stride=0):
    """-> {protocol, lengths: {length: {loss, ppl, tail_loss, tail_ppl, bits_per_byte, scored, ratio, …}}}.

    `ratio` is the perplexity over that of the shortest length. Losses in nats a token. `standard_error` of the
    loss is over documents, each weighted by its predictions. UserError: see window_sets."""
    trained = job.config.data.length
    sets, refused = window_sets(job, lengths, stride)
    token_bytes = job.eval_constants()
    scores = {n: Score(job, params, mesh, rows, n, token_bytes).summary(trained) for n, rows in sets.items()}
    shortest = scores[min(scores)]["ppl"]
    for row in scores.values():
        row["ratio"] = row["ppl"] / shortest
    protocol = {
        "windows": {str(n): rows.protocol for n, rows in sets.items()},
        "training_length": trained,
        "tail": f"last {trained} positions of a window",
        "refused": {str(n): "beyond the encoding's table" for n in refused},
        "tokenizer": job.config.data.tokenizer,
        "vocab": job.config.data.vocab,
    }
    return {"protocol": protocol, "lengths": {str(n): row for n, row in scores.items()}}


class Score:
    """Sums over all windows of one length, by position and by document, in float64."""

    def __init__(self, job, params, mesh, rows, length, token_bytes):
        self.length = length
        self.loss, self.count = np.zeros(length), np.zeros(length)  # by position
        self.documents: dict[int, np.ndarray] = {}  # document -> (loss, count)
        self.bytes = 0
        size = shard.even(min(max(1, job.config.eval.tokens_per_batch // length), len(rows)), mesh)
        batches = eval_batches(rows, size, *shard.share(mesh))
        step = jax.jit(shard.within(mesh, job.nll))
        for _ in range(len(batches)):
            batch = shard.to_global(next(batches), mesh)
            self.add(
                *(gather(t) for t in (step(params, batch), batch["weight"], batch["targets"], batch["document"])),
                token_bytes,
            )
        batches.close()
        if self.count.sum() != rows.protocol["predictions"]:
            raise UserError(f"{self.count.sum():.0f} of {rows.protocol['predictions']} predictions were scored")

    def add(self, nll, weight, targets, document, token_bytes):
        nll = np.where(weight > 0, nll, 0).astype(np.float64)
        self.loss += nll.sum(0)
        self.count += weight.sum(0)
        self.bytes += int((token_bytes[targets] * weight).sum())
        for d, a, n in zip(document, nll.sum(1), weight.sum(1), strict=True):
            if d >= 0:
                self.documents[int(d)] = self.documents.get(int(d), 0) + np.array([a, n])

    def summary(self, trained):
        loss = self.loss.sum() / self.count.sum()
        last = slice(max(0, self.length - trained), None)
        tail = self.loss[last].sum() / self.count[last].sum()
        per = np.array([self.documents[d] for d in sorted(self.documents)])
        edges = np.unique(np.linspace(0, self.length, min(BINS, self.length) + 1).astype(int))
        n = np.add.reduceat(self.count, edges[:-1])
        return {
            "loss": loss,
            "ppl": perplexity(loss),
            "tail_loss": tail,
            "tail_ppl": perplexity(tail),
            "bits_per_byte": self.loss.sum() / math.log(2) / self.bytes,
            "standard_error": standard_error(per[:, 0], per[:, 1]),
            "scored": int(self.count.sum()),
            "bytes": self.bytes,
            "documents": len(per),
            "by_document": {"loss": per[:, 0] / per[:, 1], "count": per[:, 1].astype(int)},
            "by_position": {
                "end": edges[1:],
                "loss": np.add.reduceat(self.loss, edges[:-1]) / np.maximum(n, 1),
            },
        }


def perplexity(loss):
    """exp(loss), infinite where that is too large for a float."""
    return math.exp(loss) if loss < 700 else math.inf


def standard_error(loss, count):
    """Of Σ loss / Σ count over documents (ratio estimator); None for a single document."""
    n = len(loss)
    if n < 2:
        return None
    residual = loss - loss.sum() / count.sum() * count
    return float(np.sqrt(n / (n - 1) * (residual**2).sum()) / count.sum())


def gather(array):
    """A sharded array as NumPy, whole, on every process."""
    if jax.process_count() == 1:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def table(scores):
    """Text: one line a length."""
    head = f"{'length':>8} {'PPL':>9} {'tail PPL':>9} {'bits/byte':>9} {'ratio':>7} {'± s.e.':>7} {'scored':>10}"
    lines = [head]
    for n, row in scores["lengths"].items():
        error = "" if row["standard_error"] is None else f"{row['standard_error']:.3f}"
        lines.append(
            f"{n:>8} {row['ppl']:9.2f} {row['tail_ppl']:9.2f} {row['bits_per_byte']:9.3f} {row['ratio']:7.3f} "
            f"{error:>7} {row['scored']:>10,}"
        )
    for n, why in scores["protocol"]["refused"].items():
        lines.append(f"{n:>8} {why}")
    return "\n".join(lines)


def plot(results, path):
    """Loss against length, and against position in the longest window. results {name: scores} -> PNG path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    trained = {scores["protocol"]["training_length"] for scores in results.values()}
    ticks = sorted({int(n) for scores in results.values() for n in scores["lengths"]})
    for name, scores in results.items():
        lengths = [int(n) for n in scores["lengths"]]
        rows = list(scores["lengths"].values())
        (line,) = left.plot(lengths, [r["loss"] for r in rows], "o-", label=name)
        left.plot(lengths, [r["tail_loss"] for r in rows], "s:", color=line.get_color(), markersize=4)
        longest = rows[-1]["by_position"]
        right.plot(longest["end"], longest["loss"], color=line.get_color(), label=name)
    left.set(
        xscale="log",
        xlabel="window length (tokens)",
        ylabel="loss (nats a token)",
        title="whole window ●, tail ▪",
    )
    left.set_xticks(ticks, map(str, ticks))
    left.minorticks_off()
    right.set(xlabel=f"position in windows of {ticks[-1]} tokens", title="loss by position")
    for n in trained:
        for axis in (left, right):
            axis.axvline(n, color="grey", linewidth=0.8, linestyle="--")
        right.annotate("training length", (n, right.get_ylim()[1]), rotation=90, va="top", fontsize=8, color="grey")
    left.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
