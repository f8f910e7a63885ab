"""Exact evaluation: `python -m jojax.evaluate --workdir DIR [--lengths 512,1024 [--stride N]] [--resolutions 32,48]
[--offsets 0,10] [--encoding scale_method=yarn,scale_factor=8] [--ema] [--fold]`.

Every example of a split counts once, padded and masked, in the same number of steps on every host; sums over
counts. What is found is added to DIR/result.json with its protocol; with `--encoding`, which changes options of the
trained encoding, or `--ema`, which takes the average of the parameters (`optim.ema`) instead of those of the last step,
beside what was found without, under keys that say so; and so are the scores of a run that has not finished.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from ml_collections import ConfigDict

from jojax import checkpoint, cli, extrapolate, hosts, metrics, shard, stages, task, writer
from jojax.data.stream import eval_batches
from jojax.encodings import fold as folding
from jojax.encodings.build import load
from jojax.errors import UserError
from jojax.hosts import say
from jojax.models.build import dims_of, pair
from jojax.models.kernels import KERNELS


def evaluate_split(job: task.Task, params, mesh, *, source=None, offset=None):
    """Exact metrics over a split (default: the valid split). -> {metric: value}, number scored.

    UserError where fewer or more examples were scored than the split has."""
    rows, transform = source or job.valid
    size = shard.even(min(job.config.eval.batch_size, len(rows)), mesh)
    batches, step = eval_batches(rows, size, *shard.share(mesh), transform=transform), job.evaluate_step(mesh)
    constants = job.eval_constants() if offset is None else np.asarray(offset, np.float32)
    total = None
    for _ in range(len(batches)):
        part = metrics.host(step(params, shard.to_global(next(batches), mesh), constants))
        total = part if total is None else total.merge(part)
    batches.close()
    expected = rows.protocol["predictions"] if hasattr(rows, "protocol") else len(rows)
    if metrics.scored(total) != expected:
        raise UserError(f"{metrics.scored(total)} of {expected} were scored: the data changed under the run")
    return metrics.values(total), expected


def evaluate_probe(job, params, mesh, lengths):
    """Answers of a probe (task.Probe) in rows of every length. -> {protocol, lengths: {length: {loss, accuracy, whole,
    scored}}}; `whole`: the share of rows without a wrong answer."""
    sets, refused = extrapolate.window_sets(job, lengths)
    found, protocol = {}, {"training_length": job.config.data.length, "refused": refused}
    for n, rows in sets.items():
        values, scored = evaluate_split(job, params, mesh, source=(rows, None))
        found[str(n)] = values | {"scored": scored}
        say(f"length {n:>7,}: accuracy {values['accuracy']:.4f}, whole rows {values['whole']:.4f}")
    return {"protocol": protocol | {"probe": job.config.data.name, "lengths": list(sets)}, "lengths": found}


def evaluate_resolutions(config, params, mesh, resolutions=(), offsets=()):
    """Top-1 of a vision model at other image sizes (int or (height, width)) and coordinate offsets in patches (number
    or one an axis), zero-shot: nothing is fine-tuned. Coordinates are scaled by the grid of the training; tables that
    end with it are resized by the encoding. Without sizes at that of training, without offsets at none.

    -> {protocol, rows: [{resolution, offset, …metrics, scored}]}. UserError: a size that is no whole number of
    patches, or an offset for an encoding that is a table and has no answer outside it."""
    resolutions, offsets = resolutions or (config.data.image_size,), offsets or (0.0,)
    old, rows = task.make(config), []
    check_offsets(old, offsets)
    for resolution in resolutions:
        job = at_resolution(config, resolution)
        bounded = old.model.encoding(parent=None).BOUNDED_LENGTH  # others answer at any grid as they are
        fitted = resized(config, params, old.model.spec.dims.grid, job.model.spec.dims.grid) if bounded else params
        for offset in axes(offsets, job):
            values, scored = evaluate_split(job, fitted, mesh, offset=offset)
            rows.append({"resolution": resolution, "offset": list(offset), **values, "scored": scored})
    protocol = {
        "kind": "zero-shot, every example once; tables of positions resized to the new grid",
        "resolutions": [list(pair(r)) for r in resolutions],
        "offsets": [list(offset) for offset in axes(offsets, old)],
    }
    return {"protocol": protocol, "rows": rows}


def axes(offsets, job):
    """Of each a number an axis of the grid, where it is one for all."""
    return [tuple(o) if np.ndim(o) else (o,) * job.model.spec.dims.axes for o in offsets]


def check_offsets(job, offsets):
    """UserError where the model's encoding has no answer at one of them."""
    encoding = job.model.encoding(parent=None)
    if encoding.BOUNDED_LENGTH and not encoding.RELATIVE and np.any(np.asarray(offsets)):
        raise UserError(f"{task.label(job.config)} is a table of the training grid: it has no answer at an offset")


def at_resolution(config, resolution):
    """The task of `config` with images of another size, its model as it was trained."""
    other = ConfigDict(config.to_dict())
    with other.ignore_type():  # an int or a pair, whichever the config has
        other.data.image_size = resolution
    return task.make(other, trained=dims_of(config).grid)


def resized(config, params, old_grid, new_grid):
    """The parameters for another grid, through the encoding module's `resize` where it has tables, and those of the
    parts of a joint encoding."""
    if old_grid == new_grid:
        return params

    def fit(encoding, own):
        module = sys.modules[load(encoding["name"]).__module__]
        for part in {f"of_{n}" for n in encoding if f"of_{n}" in own}:
            own = {**own, part: fit(encoding[part[3:]], own[part])}
        return module.resize(own, old_grid, new_grid) if hasattr(module, "resize") else own

    def within(tree):
        return {**tree, "encoding": fit(config.encoding, tree["encoding"])} if "encoding" in tree else tree

    return within(params) | {"blocks": within(params["blocks"])}


# ------------------------------------------------------------------------------------ command
def restore(workdir, changes=None, ema=False):
    """(result.json, config, task, parameters on a mesh, mesh) of a run; `changes`: other options of its encoding;
    `ema`: the average of the parameters."""
    result = writer.read_result(workdir)
    if result is None:
        raise UserError(f"{workdir} has no result.json: give the workdir of a run of jojax.train")
    config = ConfigDict(tuples(result["config"]))
    if ema and not config.optim.ema:
        raise UserError(f"--ema: {workdir} keeps no average of its parameters (config.optim.ema = 0)")
    done = int(checkpoint.find(workdir).name)  # of a staged run, the model of the stage that did the last step
    now = stages.at(stages.split(config), done).config.encoding
    config.encoding = ConfigDict(now.to_dict() | dict(changes or {}))
    if config.attention in KERNELS:  # of the devices of the training
        config.attention = "auto"
    mesh = _mesh(config.mesh)
    job = task.make(config)
    shapes = jax.eval_shape(job.init, jax.random.key(0))
    like = jax.tree.map(
        lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where),
        shapes,
        shard.shardings(shapes, mesh),
    )
    params, difference = checkpoint.restore_params(workdir, like, "ema" if ema else "params")
    if difference:
        what = f"the encoding with {suffix(changes)[1:]}" if changes else "its config"
        raise UserError(f"the checkpoint in {workdir} does not fit {what}: {difference}")
    return result, config, job, params, mesh


def _mesh(sizes):
    """The run's mesh, or where there are other devices now, parameters split over all of them."""
    try:
        return shard.make_mesh(sizes)
    except UserError:
        return shard.make_mesh({"fsdp": -1})


def tuples(value):
    """JSON's lists back to the tuples that configs use."""
    if isinstance(value, dict):
        return {k: tuples(v) for k, v in value.items()}
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def folded(job, params, mesh):
    """(task, parameters) of the same model with plain rope, its frames in its projections. UserError: there is none."""
    options, params = folding.fold(job.model.encoding(parent=None), jax.tree.map(extrapolate.gather, params))
    config = ConfigDict(job.config.to_dict())
    config.encoding = ConfigDict({"preset": f"{task.label(config)} folded", **options})
    return task.make(config), jax.tree.map(jax.device_put, params, shard.shardings(params, mesh))


def scored_parameters(config, ema=False):
    """For the protocol of a run that averages its parameters: which of the two were scored."""
    return {"parameters": "average" if ema else "last step"} if config.optim.ema else {}


def evaluate_run(workdir, *, lengths=(), stride=0, resolutions=(), offsets=(), changes=None, ema=False, fold=False):
    """Evaluate the newest checkpoint of a run and add what is found to its result.json. -> the new result.

    lengths, stride: see extrapolate.evaluate_lengths (language models). resolutions, offsets: see
    evaluate_resolutions; an offset counts for all axes (vision models). changes: {option: value} of the encoding.
    ema: the average of the parameters. fold: the model folded into plain rope."""
    result, config, job, params, mesh = restore(workdir, changes, ema)
    if job.unit != "tokens" and (lengths or stride):
        raise UserError("--lengths and --stride are for language models; this run trained a vision model")
    if job.unit == "tokens" and (resolutions or offsets):
        raise UserError("--resolutions and --offsets are for vision models; this run trained a language model")
    if stride and not lengths:
        raise UserError("--stride slides windows of given lengths: give --lengths too")
    note, kind, changed = {}, suffix(changes) + "-ema" * ema + "-folded" * fold, changes
    if result["state"] != "finished":  # these are not the scores of the run
        note["step"] = int(checkpoint.find(workdir).name)
        kind += f"-step{note['step']}"
        say(f"{workdir} is {result['state']}: its checkpoint of step {note['step']} is evaluated")
    job.check_data(result.get("data"), f"{workdir} was trained and evaluated with: put it back")
    if fold:
        job, params = folded(job, params, mesh)
        config, changed = job.config, job.config.encoding.to_dict()
    note |= scored_parameters(config, ema) | ({"encoding": changed} if changed else {})
    if lengths:  # what does not fit is told before the long passes
        shard.check_lengths("--lengths", lengths, mesh)
        extrapolate.window_sets(job, lengths, stride)
    for resolution in resolutions:
        at_resolution(config, resolution)
    check_offsets(job, offsets)
    values, scored = evaluate_split(job, params, mesh)
    which = f", parameters: {note['parameters']}" if config.optim.ema else ""
    say("valid:", "  ".join(f"{k} {v:.4f}" for k, v in values.items()), f" ({scored:,} {job.unit} scored{which})")
    found: dict[str, Any] = {f"evaluation{kind}": values | {"scored": scored} | ({"protocol": note} if note else {})}
    if lengths and isinstance(job, task.Probe):
        add(found, result, f"probe{kind}", evaluate_probe(job, params, mesh, lengths), lengths, note)
    elif lengths:
        scores = extrapolate.evaluate_lengths(job, params, mesh, lengths, stride=stride)
        say(extrapolate.table(scores))
        key, asked = ("sliding", (*lengths, f"stride{stride}")) if stride else ("extrapolation", lengths)
        name = add(found, result, key + kind, scores, asked, note)
        if jax.process_index() == 0:
            title = task.label(config) + suffix(changes) + "-ema" * ema
            say("plot:", extrapolate.plot({title: scores}, Path(workdir) / f"{name}.png"))
    if resolutions or offsets:
        scores = evaluate_resolutions(config, params, mesh, resolutions, offsets)
        asked = [*resolutions, *(f"offset{o:g}" for o in offsets)]
        add(found, result, f"resolutions{kind}", scores, asked, note)
        for row in scores["rows"]:
            size = "×".join(map(str, pair(row["resolution"])))
            say(f"{size:>9} px  offset {row['offset'][0]:g}  top-1 {row['accuracy']:.4f}")
    result = (writer.read_result(workdir) or result) | found  # the run may have gone on meanwhile
    if jax.process_index() == 0:
        writer.write_result(workdir, result)
    return result


def suffix(changes):
    return "".join(f"-{option}={value}" for option, value in (changes or {}).items())


def add(found, result, key, scores, asked, note=None):
    """Put scores into `found`, with `note` in their protocol. -> the key: what stands in `result` by another protocol,
    which tables are made of, stays; the new scores come beside it, under a key that names what was asked for."""
    scores["protocol"] |= note or {}
    if key in result and result[key]["protocol"] != scores["protocol"]:
        key = "-".join([key, *("x".join(map(str, a)) if isinstance(a, tuple) else str(a) for a in asked)])
    found[key] = scores
    return key


def _numbers(name, kind=int):
    text = getattr(flags.FLAGS, name)
    try:
        found = tuple(kind(part) for part in text.split(",") if part)
        if not np.isfinite(np.hstack(found or (0.0,))).all() or (text and not found):
            raise ValueError
    except ValueError:
        raise UserError(f"--{name}={text}: give numbers separated by commas") from None
    return found


def _size(text):
    """'32' -> 32, '32x48' -> (32, 48), height first."""
    sides = tuple(int(side) for side in text.split("x"))
    return sides if len(sides) == 2 else int(text)


def main(_):
    asked = dict(
        lengths=_numbers("lengths"),
        stride=flags.FLAGS.stride,
        resolutions=_numbers("resolutions", _size),
        offsets=_numbers("offsets", float),
        changes=cli.options(filter(None, flags.FLAGS.encoding.split(","))),
        ema=flags.FLAGS.ema,
        fold=flags.FLAGS.fold,
    )
    cli.keep_compiled()
    hosts.start()
    with hosts.together(flags.FLAGS.workdir):
        evaluate_run(flags.FLAGS.workdir, **asked)


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "the run's folder", required=True)
    flags.DEFINE_string("lengths", "", "window lengths, e.g. 512,1024; each must divide the largest")
    flags.DEFINE_integer("stride", 0, "sliding windows with this stride instead of disjoint ones", lower_bound=0)
    flags.DEFINE_string("resolutions", "", "image sizes, e.g. 32,48 or, height first, 32x48")
    flags.DEFINE_string("offsets", "", "added to all coordinates, in patches, e.g. 0,0.5,10")
    flags.DEFINE_string("encoding", "", "other options of the encoding, e.g. scale_method=yarn,scale_factor=8")
    flags.DEFINE_bool("ema", False, "the average of the parameters, of a run with config.optim.ema > 0")
    flags.DEFINE_bool("fold", False, "with the rotations folded into the projections: the same model, plain rope")
    hosts.define_flags()
    cli.run_main(main)
