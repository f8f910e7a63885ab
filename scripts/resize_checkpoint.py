"""The parameters of a vision run for images of another size, as a checkpoint to start from.

    python scripts/resize_checkpoint.py --workdir runs/ape --resolution 384 --out runs/ape-384
    python -m jojax.train --config configs/comrope_finetune.py:size=384,init=runs/ape-384

Tables of positions are resized by their encoding, as `jojax.evaluate --resolutions` does; all else is copied.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jojax import checkpoint, evaluate, writer  # noqa: E402 — the repository's own package, installed or not
from jojax.errors import UserError  # noqa: E402


def resize(workdir, resolution, out):
    """-> the step of the checkpoint. UserError: no run there, not of images, no whole number of patches."""
    _, config, job, params, _ = evaluate.restore(workdir)
    if job.unit == "tokens":
        raise UserError(f"{workdir} is a run of {job.unit}: only vision models have a resolution")
    other = evaluate.at_resolution(config, resolution)
    fitted = evaluate.resized(config, params, job.model.spec.dims.grid, other.model.spec.dims.grid)
    step = int(checkpoint.find(workdir).name)
    with checkpoint.Checkpoints(out) as saved:
        if not saved.save(step, {"params": fitted}, {"config": writer.plain(other.config)}):
            raise UserError(f"{out} has a checkpoint of step {step} already: choose another --out")
    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", required=True, help="a run of jojax.train")
    parser.add_argument("--resolution", type=int, required=True, help="side of the images in pixels")
    parser.add_argument("--out", required=True, help="where the checkpoint goes")
    args = parser.parse_args()
    step = resize(args.workdir, args.resolution, args.out)
    print(f"{args.workdir} at step {step} for {args.resolution} pixels: {args.out}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
