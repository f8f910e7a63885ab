"""Training and evaluation of one run, from start or from where it stopped, to its result.json."""

import contextlib
from pathlib import Path

import jax

from jojax import checkpoint, clock, diagnostics, evaluate, extrapolate, metrics, result, shard, stages, task, writer
from jojax.data.stream import train_batches
from jojax.errors import UserError
from jojax.hosts import say
from jojax.parts import Parts

EXIT_PREEMPTED = 143


def train_and_evaluate(config, name, overrides, workdir) -> int:
    """Train `config` in `workdir` and write its result. Resumes by itself; a finished run is left alone.

    -> exit code: 0, or 143 when a signal stopped the run after a checkpoint. UserError for all that the user can
    mend: another run's workdir, data, sizes, NaN, disk."""
    workdir = Path(workdir)
    old = writer.read_result(workdir)
    if old is not None:
        result.check_same_run(old["config"], writer.plain(config), workdir)
        if old["state"] == "finished":
            asked = writer.plain(config.eval)
            if any(asked.get(key) != value for key, value in old["config"].get("eval", {}).items()):
                raise UserError(
                    f"{workdir} is finished, with other config.eval keys: evaluate it further with python -m "
                    "jojax.evaluate, or choose another --workdir"
                )
            say(f"{workdir} is finished (result.json); choose another --workdir to run it again")
            return 0
    run = Run(config, name, workdir)
    run.open_data()
    record = result.describe_run(config, name, overrides) | {"state": "running"}
    if config.stages:
        record["stages"] = stages.record(run.stages)
    record["parameters"] = result.count_parameters(run.like.params)
    record["data"] = run.job.digests()
    describe(run, record)
    with writer.only_one(workdir) if jax.process_index() == 0 else contextlib.nullcontext():
        code = run.train(record)
        if code == 0:
            finish(run, record)
    return code


class Run(Parts):
    """A run: its parts, data, clock, and what is done with them."""

    def open_data(self):
        """Open all that training and the evaluations after it will read, so that what is missing or does not fit is
        told at once and before anything is written."""
        self.data = self.job.train_source()
        _ = self.job.valid
        self.check_evaluations()

    def check_evaluations(self):
        """UserError where the evaluations of the config do not fit the valid split or the model."""
        if self.job.unit == "tokens" and self.config.eval.lengths:
            extrapolate.window_sets(self.job, self.config.eval.lengths)
        if self.job.unit != "tokens":
            for resolution in self.config.eval.resolutions:
                evaluate.at_resolution(self.config, resolution)
            evaluate.check_offsets(self.job, self.config.eval.offsets)

    def start_state(self, saved: checkpoint.Checkpoints):
        """Own checkpoint → config.resume → config.init_from (parameters only) → from the seed. Starts the clock."""
        found = saved.restore_latest(self.like_at)
        if found is None and self.config.resume:
            with checkpoint.Checkpoints(self.config.resume, read_only=True) as other:
                found = other.restore_latest(self.like_at)
            if found is None:
                raise UserError(f"config.resume = {self.config.resume}: no checkpoint there")
            what = ("model", "encoding", "data", "stages")
            remedy = "config.resume continues the same model on the same data; config.init_from takes parameters alone"
            result.check_same_run(found[1].get("config"), writer.plain(self.config), self.config.resume, what, remedy)
        elif found is not None:
            result.check_same_run(found[1].get("config"), writer.plain(self.config), self.workdir)
        if found is not None:
            now, meta = found
            mend = "put the data back, or begin anew in another --workdir"
            self.job.check_data(meta.get("data"), f"the checkpoint was trained with: {mend}")
            done, steps = int(now.step), self.config.steps
            if done > steps:
                raise UserError(f"the checkpoint is at step {done}, config.steps = {steps} ends before it: raise steps")
            self.clock = clock.Clock()
            self.clock.restore(meta["clock"])
            self.compile_seconds = meta["compile_seconds"]
            say(f"going on from step {done}")
            return now
        self.like_at(0)
        now = self.fresh_state()
        if self.config.init_from:
            params, difference = checkpoint.restore_params(self.config.init_from, now.params)
            say(f"parameters from {self.config.init_from}" + (f", but {difference}" if difference else ""))
            now = now.replace(params=params, ema=None if now.ema is None else jax.tree.map(lambda t: t + 0, params))
        self.clock = clock.Clock()
        return now

    def batches(self, start):
        (source, transform), config = self.data, self.config
        index, count = shard.share(self.mesh)
        each = self.job.units_per_step // config.batch_size
        what = f"rows of {each} {self.job.unit}" if each > 1 else self.job.unit
        say(f"train split: {len(source):,} {what}; scored of the valid split: {self.job.scored()}")
        return train_batches(
            source,
            config.batch_size,
            config.seed,
            start_step=start,
            transform=transform,
            process_index=index,
            process_count=count,
            repeat=self.job.repeat,
        )

    def train(self, record) -> int:
        """-> exit code. Writes the record as soon as there is a state to train, adds the final metrics to it."""
        config, primary = self.config, jax.process_index() == 0
        with (
            checkpoint.Checkpoints(self.workdir, config.checkpoint.keep) as saved,
            clock.Preemption() as stop,
        ):
            now = self.start_state(saved)
            if primary:
                writer.write_result(self.workdir, record)
            start = int(now.step)
            with (
                writer.Writer(self.workdir, start=start, primary=primary) as out,
                contextlib.closing(self.batches(start)) as data,
            ):
                self.final, code = self.all_stages(now, data, out, saved, stop)
                if code == 0:
                    record["metrics"], record["scored"] = self.evaluate(out, self.final, config.steps)
                    code = EXIT_PREEMPTED if shard.any_process(bool(stop.requested)) else 0
        return code

    def all_stages(self, now, data, out, saved, stop):
        """From the present stage to the end of the last, or to a signal. -> state, exit code."""
        done = int(now.step)
        self.clock.begin(done)
        # a kill between a checkpoint and the evaluation of the same step leaves that one to be done
        self.told = {line["step"] for line in writer.read_metrics(self.workdir) if "valid/loss" in line}
        if self.evaluation_due(done) and shard.any_process(jax.process_index() == 0 and done not in self.told):
            self.evaluate(out, now, done)
        now, code = self.loop(now, data, out, saved, stop)
        for stage in self.stages[self.stage.number :]:
            if code == 0:
                now, code = self.loop(self.convert(now, stage), data, out, saved, stop)
        return now, code

    def loop(self, now, data, out, saved, stop):
        """Steps up to the last one of the stage or a signal. -> state, exit code."""
        config, steps, end = self.config, self.config.steps, self.stage.end
        done = int(now.step)
        if done == end:
            return now, 0  # only the end is missing
        train_step, asked = self.compiled(now), shard.Asked(self.mesh)
        while done < end:
            with self.clock.waiting():
                batch = shard.to_global(next(data), self.mesh)
            now = train_step(now, batch)
            done += 1
            if clock.every(done, config.log.every_steps, steps):
                self.log(out, now, done)
            wanted = asked(bool(stop.requested))
            if wanted or done == end or clock.every(done, config.checkpoint.every_steps, steps):
                self.save(saved, now, done)
            if wanted:
                saved.wait()
                why = stop.requested or "a signal to another process"
                say(f"stopped by {why} after step {done}; the same command goes on from here")
                return now, EXIT_PREEMPTED
            if self.evaluation_due(done):
                self.evaluate(out, now, done)
        return now, 0

    def evaluation_due(self, done):
        """Inside the run: the evaluation at its end is always done."""
        return 0 < done < self.config.steps and clock.every(done, self.config.eval.every_steps, self.config.steps)

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
        """Waits for the step, too, so that its time counts as training."""
        bad = int(now.bad_step)
        if bad >= 0:
            raise UserError(
                f"the loss or its gradient was not finite at step {bad}; nothing later was saved. "
                f"Lower optim.lr ({self.config.optim.lr:g}) or set optim.clip, and run in another --workdir; "
                f"--config.resume={self.workdir} goes on from the last checkpoint, if there is one before that step"
            )

    def save(self, saved, now, done):
        self.check_finite(now)
        with self.clock.paused():
            meta = {
                "config_name": self.name,
                "config": writer.plain(self.config),
                "data": self.job.digests(),
                "clock": self.clock.state(),
                "compile_seconds": self.compile_seconds,
            }
            saved.save(done, now, meta)

    def evaluate(self, out, now, done):
        """Exact metrics of the valid split, of the parameters and of their average. -> values, number scored."""
        self.check_finite(now)
        with self.clock.paused():
            values, scored = evaluate.evaluate_split(self.job, now.params, self.mesh)
            if now.ema is not None:
                average, _ = evaluate.evaluate_split(self.job, now.ema, self.mesh)
                values |= {f"ema_{k}": v for k, v in average.items()}
            if done not in self.told:
                out.scalars(done, {f"valid/{k}": v for k, v in values.items()})
            out.print(f"step {done}: valid " + "  ".join(f"{k} {v:.4g}" for k, v in values.items()))
        return values, scored


def finish(run: Run, record):
    """Evaluate what the config asks for and write the result."""
    config, job = run.config, run.job
    record |= {
        "steps": config.steps,
        "examples" if job.unit != "tokens" else job.unit: config.steps * job.units_per_step,
        "wall_seconds": run.clock.seconds,
        "compile_seconds": run.compile_seconds,
        "protocol": getattr(job.valid[0], "protocol", {"kind": "every example once"}),
    }
    params = run.final.params
    if isinstance(job, task.Probe):
        record["probe"] = evaluate.evaluate_probe(job, params, run.mesh, config.eval.lengths or (config.data.length,))
    elif job.unit == "tokens" and config.eval.lengths:
        record["extrapolation"] = extrapolate.evaluate_lengths(job, params, run.mesh, config.eval.lengths)
        say(extrapolate.table(record["extrapolation"]))
        if jax.process_index() == 0:
            plotted = {task.label(config): record["extrapolation"]}
            say(f"plot: {extrapolate.plot(plotted, run.workdir / 'extrapolation.png')}")
    if job.unit != "tokens" and (config.eval.resolutions or config.eval.offsets):
        asked = config.eval.resolutions, config.eval.offsets
        record["resolutions"] = evaluate.evaluate_resolutions(config, params, run.mesh, *asked)
    if config.eval.diagnostics:
        record["diagnostics"] = diagnostics.measure(job, jax.tree.map(extrapolate.gather, params))
    for key in {"probe", "extrapolation", "resolutions", "diagnostics"} & record.keys():
        record[key]["protocol"] |= evaluate.scored_parameters(config)
    if config.optim.ema and (asked := {"probe", "extrapolation", "resolutions"} & record.keys()):
        say(f"{asked.pop()}: parameters of the last step; of their average: python -m jojax.evaluate --ema")
    record["state"] = "finished"
    if jax.process_index() == 0:
        # what jojax.evaluate found while the run went on stays
        say(f"result: {writer.write_result(run.workdir, (writer.read_result(run.workdir) or {}) | record)}")


def describe(run: Run, record):
    encoding = {k: v for k, v in run.config.encoding.items() if k != "name"}
    n, d = record["parameters"], record["devices"]
    say(
        f"encoding: {run.config.encoding.name} {encoding}\n"
        f"parameters: {n['total']:,} (encoding {n['encoding']:,})\n"
        f"devices: {d['count']} × {d['kind']} in {d['processes']} process(es), mesh {dict(run.mesh.shape)}\n"
        f"workdir: {run.workdir}"
    )
