"""What a run is made of, for each of its stages: mesh, task, optimiser, compiled step, the state's shapes."""

import time
from pathlib import Path

import jax

from jojax import clock, hosts, optim, shard, stages, state, step, task


class Parts:
    """Of the stage that was entered last; `config` is that of the whole run, `devices` by default all there are."""

    clock: clock.Clock

    def __init__(self, config, name, workdir, devices=None):
        self.config, self.name, self.workdir = config, name, Path(workdir)
        self.mesh = shard.make_mesh(config.mesh, devices)
        shard.check_batch(config.batch_size, self.mesh, config.optim.accumulate)
        shard.check_sites(config, self.mesh)
        self.stages = stages.split(config)
        self.compile_seconds = 0.0
        for stage in self.stages:  # the last one is what the record describes
            self.enter(stage)

    def enter(self, stage: stages.Stage):
        """Model, optimiser and step are from now on those of `stage`."""
        config, self.stage = stage.config, stage
        self.job = job = task.make(config)
        init = jax.jit(job.init)  # its trace is kept for all who ask for shapes
        shapes = jax.eval_shape(init, jax.random.key(0))
        tx = optim.make(config.optim, stage.steps, shapes, stage.start)
        self.start = state.start(init, tx, ema=config.optim.ema > 0, aux=job.aux)
        self.like = state.abstract_state(self.start, self.mesh)
        where = jax.tree.map(lambda leaf: leaf.sharding, self.like)
        self.step_fn = step.make_train_step(job.loss, tx, config, where, job.mix)

    def like_at(self, step):
        """The state's shapes after so many steps; enters the stage that did them."""
        if self.stage is not (stage := stages.at(self.stages, step)):
            self.enter(stage)
        return self.like

    def convert(self, now, stage: stages.Stage):
        """Enter the next stage with what the one before has trained. UserError where that changes the model."""
        with self.clock.paused():
            before = self.job.probe, now.params
            self.enter(stage)
            now = stages.enter(now, self.fresh_state(), stage)
            far = stages.check_alike(before, (self.job.probe, now.params), stage)
        hosts.say(f"stage {stage.number} from step {stage.start}: logits differ by {far:.1e} of the largest")
        return now

    def fresh_state(self):
        return state.init_state(self.start, self.mesh, self.config.seed)

    def abstract_batch(self, rows=None):
        """Shapes of a batch of training, or of so many rows."""

        def lies(s):
            return jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=shard.batch_sharding(self.mesh, len(s.shape)))

        return jax.tree.map(lies, self.job.batch_shapes(rows or self.config.batch_size))

    def compiled(self, now):
        start = time.monotonic()
        with self.clock.paused():
            train_step = self.step_fn.lower(now, self.abstract_batch()).compile()
        self.compile_seconds += time.monotonic() - start
        return train_step
