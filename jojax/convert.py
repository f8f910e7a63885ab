"""Weights from elsewhere and to elsewhere.

    python -m jojax.convert import --weights FILE --config configs/F.py[:arg] --out DIR [--first_axis y]
    python -m jojax.convert export --workdir RUN --out FILE.safetensors [--fold] [--format timm] [--first_axis y]

`import` takes weights of timm's vision transformers into the ViT of a config (timm.py says which, and how): DIR is a
finished run of no steps, which config.init_from and `jojax.evaluate` take. Every weight of the file is used, every
parameter of the model filled, or a sentence says what does not fit. Files are .safetensors or, where torch is
installed, what `torch.load` reads as weights alone.

`export` writes the newest checkpoint of any run in float32 under its own names ('blocks/query/kernel', blocks stacked),
with config, encoding, step and version as metadata; `import` knows such a file by it and needs no config then. What
--format=timm writes is for a model of timm's built alike: no_embed_class, rope_grid_indexing by --first_axis, eps, ….
"""

import importlib
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from ml_collections import ConfigDict
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jojax import __version__, checkpoint, cli, evaluate, extrapolate, result, task, timm, writer
from jojax.errors import UserError, first_line
from jojax.tree import leaves, named_map

NESTED = ("state_dict_ema", "model_ema", "state_dict", "model")  # where training scripts put the weights
SAME = {"norm": "layernorm", "mlp": "gelu", "eps": 1e-6}  # what no weight says of timm's models


def read(path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """{name: float32 array} and metadata of a file of weights."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"--weights={path}: no such file")
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, "numpy") as file:
                return {n: file.get_tensor(n).astype(np.float32) for n in file.keys()}, file.metadata() or {}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is not read as safetensors ({error})") from error
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        raise UserError(
            f"{path} is no .safetensors file and torch is not installed: install it, or convert the file elsewhere "
            "with safetensors.torch.save_file"
        ) from None
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        while inner := next((found[key] for key in NESTED if key in found), None):
            found = inner
        return {name: t.float().numpy() for name, t in found.items()}, {}
    except Exception as error:  # whatever unpickling raises
        raise UserError(
            f"{path} is not read as weights alone ({first_line(error)}): save its state dict by itself"
        ) from error


def import_weights(weights, out, config=None, name="", overrides=None, first="x"):
    """Write the weights of a file to `out` as a run of `config`, which may be None for a file of `export`'s."""
    tensors, metadata = read(weights)
    own = metadata.get("format") == "jojax"
    if config is None:
        if not own:
            raise UserError("--config is missing: it describes the model that the weights are for")
        config = ConfigDict(evaluate.tuples(json.loads(metadata["config"])))
    job = task.make(config)
    if not own:
        check_alike(job)
    like = jax.eval_shape(job.init, jax.random.key(0))
    if own:
        found, step = tensors, int(metadata["step"])
        if differs := checkpoint.difference(*({n: t.shape for n, t in x.items()} for x in (tensors, leaves(like)))):
            raise UserError(f"the weights do not fit the model: {differs}; leave --config out to take the file's own")
    else:
        found, step = timm.from_timm(tensors, leaves(like), job.model.encoding(parent=None), first), 0
    params = named_map(lambda path, t: np.ascontiguousarray(found[path], t.dtype), like)
    if (Path(out) / "result.json").exists():
        raise UserError(f"{out} holds a run: choose another --out")
    with checkpoint.Checkpoints(out) as saved:
        if not saved.save(step, {"params": params}, {"config": writer.plain(config)}):
            raise UserError(f"{out} has a checkpoint of step {step} already: choose another --out")
    record = {
        "state": "finished",
        "steps": step,
        "weights": str(weights),
        "parameters": result.count_parameters(params),
    }
    writer.write_result(out, result.describe_run(config, name, overrides) | record)
    return params


def check_alike(job):
    """UserError where the task's model differs from timm's in what no weight says."""
    if job.unit != "images":
        raise UserError("the weights of a vision transformer need a config of a vision model")
    for key, value in SAME.items():
        if job.config.model[key] != value:
            raise UserError(
                f"model.{key} = {job.config.model[key]}: timm's have {value} (--config.model.{key}={value})"
            )
    timm.rotation(job.model.encoding(parent=None))


def export_weights(workdir, out, fold=False, form="jojax", first="x"):
    """Write the newest checkpoint of a run to a safetensors file. -> {name: array}"""
    _, _, job, params, mesh = evaluate.restore(workdir)
    if fold:
        job, params = evaluate.folded(job, params, mesh)
    tensors = {path: np.asarray(extrapolate.gather(t), np.float32) for path, t in leaves(params).items()}
    config = ConfigDict(job.config.to_dict())
    config.stages = ()  # they are done
    if form == "timm":
        if job.unit != "images":
            raise UserError(f"{workdir} is a run of {job.unit}: only vision models have a counterpart in timm")
        encoding = job.model.encoding(parent=None)
        tensors = timm.published(timm.to_timm(tensors, encoding, first), timm.rotation(encoding) is not None)
    metadata = {
        "format": {"jojax": "jojax", "timm": "pt"}[form],
        "config": json.dumps(writer.plain(config)),
        "encoding": json.dumps(writer.plain(config.encoding)),
        "step": checkpoint.find(workdir).name,
        "jojax": __version__,
    }
    try:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        save_file({name: np.ascontiguousarray(t) for name, t in tensors.items()}, out, metadata)
    except (SafetensorError, OSError) as error:
        raise UserError(f"cannot write {out} ({error}): choose another --out") from error
    return tensors


# ------------------------------------------------------------------------------------ command
def main(argv):
    F = flags.FLAGS
    if argv[1:] == ["import"]:
        if not (F.weights and F.out):
            raise UserError("import needs --weights=FILE and --out=DIR")
        config, name, overrides = (None, "", None) if F.config is None else cli.parsed_config()
        params = import_weights(F.weights, F.out, config, name, overrides, F.first_axis)
        print(f"{result.count_parameters(params)['total']:,} parameters of {F.weights}: {F.out}")
    elif argv[1:] == ["export"]:
        if not (F.workdir and F.out):
            raise UserError("export needs --workdir=RUN and --out=FILE.safetensors")
        tensors = export_weights(F.workdir, F.out, F.fold, F.format, F.first_axis)
        print(f"{sum(t.size for t in tensors.values()):,} parameters of {F.workdir}: {F.out}")
    else:
        raise UserError(f"{' '.join(argv[1:]) or 'nothing'!r} is not understood: say import or export")


if __name__ == "__main__":
    cli.define_config(required=False)
    flags.DEFINE_string("weights", None, "import: a .safetensors file, or one of torch's")
    flags.DEFINE_string("workdir", None, "export: the run's folder")
    flags.DEFINE_string("out", None, "import: the folder of the new run; export: the .safetensors file")
    flags.DEFINE_bool("fold", False, "export: with the rotations folded into the projections")
    flags.DEFINE_enum("format", "jojax", ["jojax", "timm"], "export: whose names")
    flags.DEFINE_enum("first_axis", "x", ["x", "y"], "timm: the axis of the first half of the planes")
    flags.FLAGS.set_gnu_getopt()
    cli.run_main(main, positional=True)
