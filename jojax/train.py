"""`python -m jojax.train --config configs/F.py[:arg] [--workdir DIR] [--config.a.b=v] [--dry_run]`

Trains, resumes by itself, evaluates, writes DIR/result.json (default DIR: runs/F[-arg]). `--dry_run` needs no data:
it builds everything by shape, prints parameters and memory, says what data is missing, and exits with 0.
"""

import os
import sys
from pathlib import Path

from absl import flags

from jojax import cli, config
from jojax.errors import UserError

FULL_SET = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def start_processes(asked: bool):
    """`jax.distributed` when asked for (--distributed: SLURM, TPU pods, …) or clearly given by all three variables."""
    import jax

    given = [name for name in FULL_SET if os.environ.get(name)]
    if len(given) == len(FULL_SET):
        address, count, index = (os.environ[name] for name in FULL_SET)
        jax.distributed.initialize(address, int(count), int(index))
    elif given:
        missing = ", ".join(sorted(set(FULL_SET) - set(given)))
        raise UserError(f"{', '.join(given)} is set, but {missing} is not: set all three or none")
    elif asked:
        jax.distributed.initialize()


def main(_):
    FLAGS = flags.FLAGS
    settings, spec, overrides = cli.parsed_config()
    workdir = Path(FLAGS.workdir or Path("runs") / config.run_name(spec))
    if FLAGS.dry_run:
        from jojax import dry_run

        print(dry_run.report(settings, spec))
        return
    start_processes(FLAGS.distributed)
    from jojax import loop

    code = loop.train_and_evaluate(settings, spec, overrides, workdir)
    if code:
        sys.exit(code)


if __name__ == "__main__":
    cli.define_config()
    flags.DEFINE_string("workdir", None, "where the run lives; default runs/<config>[-arg]")
    flags.DEFINE_boolean("dry_run", False, "build everything by shape and report; needs no data")
    flags.DEFINE_boolean("distributed", False, "start jax.distributed from the cluster's environment")
    cli.run_main(main)
