"""What a config would build, without data or memory: shapes, parameters, state memory, missing data."""

import math

import jax
from clu import parameter_overview

from jojax import checkpoint, loop, result, shard, stages
from jojax.errors import UserError


def traced(config, name) -> loop.Run:
    """The run, its training steps traced by shape: a config that cannot run fails here. UserError likewise."""
    run = loop.Run(config, name, "")
    for stage in run.stages:
        run.enter(stage)
        jax.eval_shape(run.step_fn, run.like, run.abstract_batch())
    return run


def report(config, name) -> str:
    """Text; see `traced`."""
    run = traced(config, name)
    n = result.count_parameters(run.like.params)
    lines = [
        parameter_overview.get_parameter_overview(run.like.params, include_stats=False),
        *stage_lines(run.stages),
        f"encoding: {config.encoding.to_dict()}",
        f"parameters: {n['total']:,} (body {n['body']:,}, encoding {n['encoding']:,})",
        f"memory of the state: {memory(run.like)} in all (parameters {memory(run.like.params)}, optimiser "
        f"{memory(run.like.opt_state)}), gradients {memory(run.like.params)}; a device's share of {run.mesh.size}: "
        f"{megabytes(shard.device_bytes(run.like))} and {megabytes(shard.device_bytes(run.like.params))}",
        f"batch: {memory(run.abstract_batch())}, {run.job.units_per_step:,} {run.job.unit} a step; "
        f"{config.steps:,} steps = {config.steps * run.job.units_per_step:,} {run.job.unit}",
        *data_report(run),
    ]
    return "\n".join(lines)


def stage_lines(found):
    """None for a run of one stage."""
    for s in stages.record(found) if len(found) > 1 else ():
        told = ", ".join(f"{key} {s[key]}" for key in ("lr", "encoding_lr", "trained", "reset_optimizer"))
        yield f"stage of steps {s['steps'][0]:,} to {s['steps'][1]:,}: {s['encoding']}, {told}"


def memory(tree) -> str:
    """Of all devices together."""
    return megabytes(sum(math.prod(t.shape) * t.dtype.itemsize for t in jax.tree.leaves(tree)))


def megabytes(n) -> str:
    return f"{n / 2**20:,.1f} MiB"


def data_report(run):
    """Lines. UserError: the data is there, but the evaluations of the config do not fit it."""
    missing, told = 0, set()
    for split, open_split in (("train", run.job.train_source), ("valid", lambda: run.job.valid)):
        try:
            source, _ = open_split()
            yield f"{split} split: {len(source):,} rows"
        except UserError as error:
            missing += 1
            # the valid split of texts needs the tokenizer of the train split
            yield f"{split} split missing: {error}" if str(error) not in told else f"{split} split not read, as above"
            told.add(str(error))
    if not missing:
        run.check_evaluations()
    for start in filter(None, (run.config.resume, run.config.init_from)):
        try:
            yield f"starts from {checkpoint.find(start)}"
        except UserError as error:
            yield f"start missing: {error}"
