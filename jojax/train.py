"""`python -m jojax.train --config configs/F.py[:arg] [--workdir DIR] [--config.a.b=v] [--dry_run]`

Trains, resumes by itself, evaluates, writes DIR/result.json (default DIR: runs/F[-arg]). `--dry_run` needs no data:
it builds everything by shape, prints parameters and memory, says what data is missing, and exits with 0. On several
hosts the same command runs on each, with a workdir that they share (jojax/hosts.py).
"""

import sys
from pathlib import Path

from absl import flags

from jojax import cli, config, hosts


def main(_):
    FLAGS = flags.FLAGS
    settings, spec, overrides = cli.parsed_config()
    workdir = Path(FLAGS.workdir or Path("runs") / config.run_name(spec))
    if FLAGS.dry_run:
        from jojax import dry_run

        print(dry_run.report(settings, spec))
        return
    cli.keep_compiled()
    hosts.start()
    from jojax import loop

    with hosts.together(workdir):
        code = loop.train_and_evaluate(settings, spec, overrides, workdir)
    if code:
        sys.exit(code)


if __name__ == "__main__":
    cli.define_config()
    flags.DEFINE_string("workdir", None, "where the run lives; default runs/<config>[-arg]")
    flags.DEFINE_boolean("dry_run", False, "build everything by shape and report; needs no data")
    hosts.define_flags()
    cli.run_main(main)
