"""Exact evaluation: `python -m jojax.evaluate --workdir DIR [--lengths 512,1024] [--stride N] [--resolutions 32,48]`.

Every example of a split counts once, padded and masked, in the same number of steps on every host; sums over
counts. What is found is added to DIR/result.json with its protocol.
"""

import sys
from pathlib import Path

import jax
import numpy as np
from absl import flags
from ml_collections import ConfigDict

from jojax import checkpoint, cli, metrics, shard, task, writer
from jojax.data.stream import eval_batches
from jojax.encodings.build import load
from jojax.errors import UserError


def even(batch_size, mesh):
    """The next multiple of the devices that split a batch; padding rows weigh nothing."""
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    return -(-batch_size // parts) * parts


def evaluate_split(job: task.Task, params, mesh, *, source=None, offset=None):
    """Exact metrics over a split (default: the valid split). -> {metric: value}, number scored.

    UserError where fewer or more examples were scored than the split has."""
    rows, transform = source or job.valid
    size = even(job.config.eval.batch_size, mesh)
    batches = eval_batches(rows, size, jax.process_index(), jax.process_count(), transform=transform)
    constants = job.eval_constants() if offset is None else np.asarray(offset, np.float32)
    total = None
    for _ in range(len(batches)):
        part = metrics.host(job.evaluate_step(params, shard.to_global(next(batches), mesh), constants))
        total = part if total is None else total.merge(part)
    batches.close()
    expected = rows.protocol["predictions"] if hasattr(rows, "protocol") else len(rows)
    if metrics.scored(total) != expected:
        raise UserError(f"{metrics.scored(total)} of {expected} were scored: the data changed under the run")
    return metrics.values(total), expected


def evaluate_resolutions(config, params, mesh, resolutions, offsets=((0.0, 0.0),)):
    """Top-1 of a vision model at other image sizes and coordinate offsets, zero-shot (nothing is fine-tuned).

    Tables that depend on the grid are resized by the encoding. -> [{resolution, offset, …metrics, scored}]"""
    rows = []
    for resolution in resolutions:
        other = ConfigDict(config.to_dict())
        other.data.image_size = resolution
        job, old = task.make(other), task.make(config)
        fitted = resized(config, params, old.model.spec.dims.grid, job.model.spec.dims.grid)
        for offset in offsets:
            values, scored = evaluate_split(job, fitted, mesh, offset=offset)
            rows.append({"resolution": resolution, "offset": list(offset), **values, "scored": scored})
    return rows


def resized(config, params, old_grid, new_grid):
    """The parameters for another grid, through the encoding module's `resize` where it has tables."""
    resize = getattr(sys.modules[load(config.encoding.name).__module__], "resize", None)
    if old_grid == new_grid or resize is None or "encoding" not in params:
        return params
    return {**params, "encoding": resize(params["encoding"], old_grid, new_grid)}


# ------------------------------------------------------------------------------------ command
def restore(workdir):
    """(result.json, config, task, parameters on a mesh, mesh) of a run."""
    result = writer.read_result(workdir)
    if result is None:
        raise UserError(f"{workdir} has no result.json: give the workdir of a run of jojax.train")
    config = ConfigDict(_tuples(result["config"]))
    mesh = shard.make_mesh(config.mesh)
    job = task.make(config)
    shapes = jax.eval_shape(job.init, jax.random.key(0))
    like = jax.tree.map(
        lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where),
        shapes,
        shard.shardings(shapes, mesh),
    )
    params, difference = checkpoint.restore_params(workdir, like)
    if difference:
        raise UserError(f"the checkpoint in {workdir} does not fit its config: {difference}")
    return result, config, job, params, mesh


def _tuples(value):
    """JSON's lists back to the tuples that configs use."""
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _numbers(text, kind=int, name=""):
    try:
        return tuple(kind(part) for part in text.split(",") if part)
    except ValueError:
        raise UserError(f"--{name}={text}: give numbers separated by commas") from None


def main(_):
    from jojax import extrapolate

    workdir = Path(flags.FLAGS.workdir)
    result, config, job, params, mesh = restore(workdir)
    lengths = _numbers(flags.FLAGS.lengths, name="lengths")
    resolutions = _numbers(flags.FLAGS.resolutions, name="resolutions")
    offsets = _numbers(flags.FLAGS.offsets, float, "offsets") or (0.0,)
    if job.unit == "images" and (lengths or flags.FLAGS.stride):
        raise UserError("--lengths and --stride are for language models; this run trained a vision model")
    if job.unit == "tokens" and (resolutions or flags.FLAGS.offsets):
        raise UserError("--resolutions and --offsets are for vision models; this run trained a language model")
    values, scored = evaluate_split(job, params, mesh)
    print("valid:", "  ".join(f"{k} {v:.4f}" for k, v in values.items()), f" ({scored:,} {job.unit} scored)")
    result["evaluation"] = {**values, "scored": scored}
    if lengths:
        key = "sliding" if flags.FLAGS.stride else "extrapolation"
        result[key] = extrapolate.evaluate_lengths(job, params, mesh, lengths, stride=flags.FLAGS.stride)
        print(extrapolate.table(result[key]))
        if jax.process_index() == 0:
            print(
                "plot:",
                extrapolate.plot(
                    {config.encoding.get("preset", config.encoding.name): result[key]}, workdir / f"{key}.png"
                ),
            )
    if resolutions or flags.FLAGS.offsets:
        sizes = resolutions or (config.data.image_size,)
        rows = evaluate_resolutions(config, params, mesh, sizes, [(o, o) for o in offsets])
        result["resolutions"] = {"protocol": "zero-shot, whole valid split", "rows": rows}
        for row in rows:
            print(f"{row['resolution']:>5} px  offset {row['offset'][0]:g}  top-1 {row['accuracy']:.4f}")
    if jax.process_index() == 0:
        writer.write_result(workdir, result)


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "the run's folder", required=True)
    flags.DEFINE_string("lengths", "", "window lengths, e.g. 512,1024; each must divide the largest")
    flags.DEFINE_integer("stride", 0, "sliding windows with this stride instead of disjoint ones", lower_bound=0)
    flags.DEFINE_string("resolutions", "", "image sizes, e.g. 32,48")
    flags.DEFINE_string("offsets", "", "added to both coordinates, in patches, e.g. 0,0.5,10")
    cli.run_main(main)
