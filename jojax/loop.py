"""Training and evaluation of one run, from start or from where it stopped, to its result.json."""

import time
from pathlib import Path

import jax
from flax import traverse_util

from jojax import checkpoint, clock, evaluate, metrics, optim, result, shard, state, step, task, writer
from jojax.data.stream import train_batches
from jojax.errors import UserError

EXIT_PREEMPTED = 143
# what may change between the lives of a run: it does not touch the numbers
FREE = ("checkpoint", "log", "mesh", "eval", "attention", "model.scan", "model.remat", "data.cache")


def train_and_evaluate(config, name, overrides, workdir) -> int:
    """Train `config` in `workdir` and write its result. Resumes by itself; a finished run is left alone.

    -> exit code: 0, or 143 when a signal stopped the run after a checkpoint. UserError for all that the user can
    mend: another run's workdir, data, sizes, NaN, disk."""
    workdir = Path(workdir)
    old = writer.read_result(workdir)
    if old is not None:
        check_same_run(old["config"], writer.plain(config), workdir)
        if old["state"] == "finished":
            say(f"{workdir} is finished (result.json); choose another --workdir to run it again")
            return 0
    run = Run(config, name, workdir)
    record = result.describe_run(config, name, overrides) | {"state": "running"}
    record["parameters"] = result.count_parameters(run.like.params)
    if jax.process_index() == 0:
        writer.write_result(workdir, record)
    describe(run, record)
    code = run.train(record)
    if code == 0:
        finish(run, record)
    return code


class Run:
    """The parts of a run: mesh, task, optimiser, compiled step, state, data, clock."""

    def __init__(self, config, name, workdir):
        self.config, self.name, self.workdir = config, name, Path(workdir)
        self.mesh = shard.make_mesh(config.mesh)
        shard.check_batch(config.batch_size, self.mesh, config.optim.accumulate)
        self.job = job = task.make(config)
        shapes = jax.eval_shape(job.init, jax.random.key(0))
        self.tx = optim.make(config.optim, config.steps, shapes)
        ema = config.optim.ema > 0
        self.like = state.abstract_state(job.init, self.tx, self.mesh, ema=ema, aux=job.aux)
        where = jax.tree.map(lambda leaf: leaf.sharding, self.like)
        self.step_fn = step.make_train_step(job.loss, self.tx, config, where)
        self.clock = clock.Clock()
        self.compile_seconds = 0.0

    def abstract_batch(self):
        where = shard.batch_sharding(self.mesh)
        shapes = self.job.batch_shapes(self.config.batch_size)
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), shapes)

    def start_state(self, saved: checkpoint.Checkpoints):
        """Own checkpoint → config.resume → config.init_from (parameters only) → from the seed."""
        found = saved.restore_latest(self.like)
        if found is None and self.config.resume:
            with checkpoint.Checkpoints(self.config.resume) as other:
                found = other.restore_latest(self.like)
            if found is None:
                raise UserError(f"config.resume = {self.config.resume}: no checkpoint there")
        if found is not None:
            now, meta = found
            self.clock.restore(meta["clock"])
            self.compile_seconds = meta["compile_seconds"]
            say(f"going on from step {int(now.step)}")
            return now
        now = state.init_state(
            self.job.init, self.tx, self.mesh, self.config.seed, ema=self.like.ema is not None, aux=self.job.aux
        )
        if self.config.init_from:
            params, difference = checkpoint.restore_params(self.config.init_from, now.params)
            say(f"parameters from {self.config.init_from}" + (f", but {difference}" if difference else ""))
            now = now.replace(params=params, ema=None if now.ema is None else jax.tree.map(lambda t: t + 0, params))
        return now

    def train(self, record) -> int:
        config, steps = self.config, self.config.steps
        source, transform = self.job.train_source()
        say(f"train split: {len(source):,} examples of {self.job.units_per_step // config.batch_size} {self.job.unit}")
        with (
            checkpoint.Checkpoints(self.workdir, config.checkpoint.keep) as saved,
            clock.Preemption() as stop,
        ):
            now = self.start_state(saved)
            done = int(now.step)
            primary = jax.process_index() == 0
            data = train_batches(
                source,
                config.batch_size,
                config.seed,
                start_step=done,
                transform=transform,
                process_index=jax.process_index(),
                process_count=jax.process_count(),
            )
            train_step = self.compiled(now)
            with writer.Writer(self.workdir, start=done, primary=primary) as out:
                self.clock.begin(done)
                while done < steps:
                    with self.clock.waiting():
                        batch = shard.to_global(next(data), self.mesh)
                    now = train_step(now, batch)
                    done += 1
                    if clock.every(done, config.log.every_steps, steps):
                        self.log(out, now, done)
                    wanted = shard.any_process(bool(stop.requested))
                    if wanted or clock.every(done, config.checkpoint.every_steps, steps):
                        self.save(saved, now, done)
                    if wanted:
                        saved.wait()
                        say(f"stopped by {stop.requested} after step {done}; the same command goes on from here")
                        data.close()
                        return EXIT_PREEMPTED
                    if done < steps and config.eval.every_steps and done % config.eval.every_steps == 0:
                        self.evaluate(out, now, done)
                data.close()
                record["metrics"], record["scored"] = self.evaluate(out, now, done)
        self.final = now
        return 0

    def compiled(self, now):
        start = time.monotonic()
        with self.clock.paused():
            train_step = self.step_fn.lower(now, self.abstract_batch()).compile()
        self.compile_seconds += time.monotonic() - start
        return train_step

    def log(self, out, now, done):
        values = metrics.averages(now.sums)
        self.check_finite(now)
        rate, waiting = self.clock.lap(done)
        speed = rate * self.job.units_per_step
        out.scalars(done, {f"train/{k}": v for k, v in values.items()} | {f"{self.job.unit}_per_second": speed})
        shown = {k: values[k] for k in ("loss", *self.job.aux)}
        left = (self.config.steps - done) / max(rate, 1e-9)
        out.print(writer.progress_line(done, self.config.steps, shown, speed, self.job.unit, waiting, left))

    def check_finite(self, now):
        bad = int(now.bad_step)
        if bad >= 0:
            raise UserError(
                f"the loss or its gradient was not finite at step {bad}; nothing later was saved. "
                f"Lower optim.lr ({self.config.optim.lr:g}) or set optim.clip, and run again from the last checkpoint"
            )

    def save(self, saved, now, done):
        with self.clock.paused():
            self.check_finite(now)
            meta = {
                "config_name": self.name,
                "clock": self.clock.state(),
                "compile_seconds": self.compile_seconds,
            }
            saved.save(done, now, meta)

    def evaluate(self, out, now, done):
        """Exact metrics of the valid split, of the parameters and of their average."""
        with self.clock.paused():
            values, scored = evaluate.evaluate_split(self.job, now.params, self.mesh)
            if now.ema is not None:
                average, _ = evaluate.evaluate_split(self.job, now.ema, self.mesh)
                values |= {f"ema_{k}": v for k, v in average.items()}
            out.scalars(done, {f"valid/{k}": v for k, v in values.items()})
            out.print(f"step {done}: valid " + "  ".join(f"{k} {v:.4g}" for k, v in values.items()))
        return values, scored


def finish(run: Run, record):
    """Evaluate what the config asks for and write the result."""
    config, job = run.config, run.job
    record |= {
        "steps": config.steps,
        job.unit: config.steps * job.units_per_step,
        "wall_seconds": run.clock.seconds,
        "compile_seconds": run.compile_seconds,
        "protocol": getattr(job.valid[0], "protocol", {"kind": "every example once"}),
    }
    params = run.final.params
    if job.unit == "tokens" and config.eval.lengths:
        from jojax import extrapolate

        record["extrapolation"] = extrapolate.evaluate_lengths(job, params, run.mesh, config.eval.lengths)
        say(extrapolate.table(record["extrapolation"]))
        if jax.process_index() == 0:
            plotted = {label(config): record["extrapolation"]}
            say(f"plot: {extrapolate.plot(plotted, run.workdir / 'extrapolation.png')}")
    if job.unit == "images" and config.eval.resolutions:
        rows = evaluate.evaluate_resolutions(config, params, run.mesh, config.eval.resolutions)
        record["resolutions"] = {"protocol": "zero-shot, whole valid split", "rows": rows}
    record["state"] = "finished"
    if jax.process_index() == 0:
        say(f"result: {writer.write_result(run.workdir, record)}")


def check_same_run(old, new, workdir):
    """UserError naming the keys that differ, where `workdir` holds a run of another config."""
    flat = [traverse_util.flatten_dict(tree, sep=".") for tree in (old, new)]
    keys = sorted(set(flat[0]) | set(flat[1]))
    differ = [k for k in keys if flat[0].get(k) != flat[1].get(k) and not k.startswith(FREE)]
    if differ:
        told = ", ".join(f"{k}: {flat[0].get(k)} → {flat[1].get(k)}" for k in differ[:6])
        raise UserError(f"{workdir} holds a run of another config ({told}): choose another --workdir or remove it")


def describe(run: Run, record):
    encoding = {k: v for k, v in run.config.encoding.items() if k != "name"}
    n, d = record["parameters"], record["devices"]
    say(
        f"encoding: {run.config.encoding.name} {encoding}\n"
        f"parameters: {n['total']:,} (encoding {n['encoding']:,})\n"
        f"devices: {d['count']} × {d['kind']} in {d['processes']} process(es), mesh {dict(run.mesh.shape)}\n"
        f"workdir: {run.workdir}"
    )


def label(config):
    return config.encoding.get("preset", config.encoding.name)


def say(line):
    if jax.process_index() == 0:
        print(line, flush=True)
