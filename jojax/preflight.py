"""Does it fit, and what bounds it? `python -m jojax.preflight --config configs/F.py[:arg] [--config.a.b=v]
--topology v5e:16x16 | v5p:4x4x4 | h200:8 [--compare rope,jo_projected] [--quick] [--json FILE]`

Compiles the training step and the step of an evaluation for chips that need not be there (jojax/chips.py: which, and
what they can do), the last stage's where there are several, and tells each device's memory, FLOPs, bytes and
collectives (jojax/hlo.py: how they are counted), the share of the FLOPs that the model itself needs (jojax/flops.py),
and the least time of a step: the longest of computing, memory and interconnect, as if each ran at the chip's peak and
all at once. `--compare`: the same config with each of these encodings, over the first. `--quick`: the compiler searches
less (minutes become seconds for a TPU, a GPU has no Triton); FLOPs and collectives are the same, memory and bytes not
quite.

Exit code: 0 it fits, 1 it does not (what would help is told), 2 an error that you can mend.
"""

import json
import math
import re
import sys
import time
from pathlib import Path
from typing import Any

from absl import flags

from jojax import chips, cli, config

SIZE = r"([\d.]+)([KMGT])"
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


# ------------------------------------------------------------------------------------ measuring
def measure(settings, spec, topology, quick=False) -> dict:
    """All numbers of one config on one topology, after `chips.prepare`, which was told `quick`."""
    import jax

    from jojax import flops, result, shard
    from jojax.parts import Parts

    chip, devices = chips.devices(topology)
    parts = Parts(settings, spec, "", devices)
    job, params, count = parts.job, parts.like.params, len(devices)
    rows = shard.even(settings.eval.batch_size, parts.mesh)
    constants = job.eval_constants() if job.unit != "tokens" else jax.ShapeDtypeStruct((settings.data.vocab,), "int32")
    steps = {
        "train": (parts.step_fn, (parts.like, parts.abstract_batch()), settings.batch_size, flops.training),
        "eval": (job.evaluate_step(parts.mesh), (params, parts.abstract_batch(rows), constants), rows, flops.forward),
    }
    found: dict[str, dict[str, Any]] = {
        name: {"batch": batch, **compiled(step, arguments, chip, model(settings) * batch / count)}
        for name, (step, arguments, batch, model) in steps.items()
    }
    out: dict[str, Any] = {
        "config": spec,
        "topology": topology,
        "devices": count,
        "mesh": dict(parts.mesh.shape),
        "encoding": settings.encoding.to_dict(),
        "quick": quick,
        "parameters": result.count_parameters(params),
        "versions": result.versions(),
        "steps": found,
    }
    out["fits"] = all(step["memory"]["left"] >= 0 for step in found.values())
    out["remedies"] = [] if out["fits"] else remedies(settings, out)
    return out


def compiled(step, arguments, chip, model) -> dict:
    """Numbers of one compiled step, for each device; memory alone where the compiler finds that it does not fit."""
    import jax

    from jojax import hlo, shard
    from jojax.models import attention

    start = time.monotonic()
    try:
        with attention.compiled_for(chip.platform):  # the chip's own kernels
            program = step.lower(*arguments).compile()
    except jax.errors.JaxRuntimeError as error:
        said = re.search(
            rf"Used {SIZE} of {SIZE} hbm|temporaries \({SIZE}\) exceeds available HBM \({SIZE}\)", str(error)
        )
        if not said:
            raise
        peak, room = (float(n) * UNITS[unit] for n, unit in re.findall(SIZE, said[0]))
        given = shard.device_bytes([leaf for leaf in jax.tree.leaves(arguments) if getattr(leaf, "sharding", None)])
        peak += given if "temporaries" in said[0] else 0
        memory = {"arguments": given, "temporaries": peak - given, "peak": peak, "left": room - peak}
        return {"memory": memory, "compile_seconds": time.monotonic() - start}
    seconds = time.monotonic() - start
    of, cost = program.memory_analysis(), hlo.cost(program.as_text())
    peak = of.argument_size_in_bytes + of.output_size_in_bytes - of.alias_size_in_bytes + of.temp_size_in_bytes
    peak += of.generated_code_size_in_bytes
    sent = sum(each for _, each in cost.collectives.values())
    least = {
        "compute": cost.flops / chip.flops,
        "memory": cost.bytes / chip.bandwidth,
        "interconnect": sent / chip.interconnect,
    }
    return {
        "memory": {
            "arguments": of.argument_size_in_bytes,
            "temporaries": of.temp_size_in_bytes,
            "peak": peak,
            "left": chip.memory - peak,
        },
        "flops": cost.flops,
        "model_flops": model,
        "bytes": cost.bytes,
        "collectives": {kind: {"runs": runs, "bytes": each} for kind, (runs, each) in sorted(cost.collectives.items())},
        "uncounted_kernels": cost.uncounted,
        "open_loops": cost.open_loops,
        "seconds": least,
        "bound": max(least, key=lambda k: least[k]),
        "compile_seconds": seconds,
    }


def remedies(settings, out) -> list[str]:
    """Settings that would save memory in training, estimated: temporaries go with the rows of a micro-batch, arguments
    with 1/fsdp."""
    step, mesh, found = out["steps"]["train"], out["mesh"], []
    if step["memory"]["left"] >= 0:
        return ["--config.eval.batch_size: smaller"]
    of, accumulate = step["memory"], settings.optim.accumulate
    room = of["peak"] + of["left"]
    if not settings.model.remat:
        found.append("--config.model.remat=True")
    rows = settings.batch_size // (mesh["data"] * mesh["fsdp"] * accumulate)
    need = of["temporaries"] / max(room - of["arguments"], 1)
    fitting = [n for n in range(2, rows + 1) if rows % n == 0 and n >= need]
    if fitting and of["arguments"] < room:
        found.append(f"--config.optim.accumulate={accumulate * fitting[0]}")
        found.append(f"--config.batch_size={settings.batch_size // fitting[0]}")
    if mesh["fsdp"] < mesh["data"] * mesh["fsdp"]:
        found.append(f"--config.mesh.fsdp={mesh['data'] * mesh['fsdp']} --config.mesh.data=1")
    return found or ["more chips, or a smaller model"]


# --------------------------------------------------------------------------------------- telling
def of_bytes(n) -> str:
    sign, n = "−" * (n < 0), abs(n)
    return f"{sign}{n / 2**30:,.2f} GiB" if n >= 2**28 else f"{sign}{n / 2**20:,.2f} MiB"


def of_seconds(s) -> str:
    return f"{s:,.2f} s" if s >= 1 else f"{s * 1e3:,.3f} ms"


def rows_of(step) -> dict[str, tuple[float, str]]:
    """{what: (number, as told)} of one step."""
    memory = step["memory"]
    room = memory["peak"] + memory["left"]
    out = {
        "arguments": memory["arguments"],
        "temporaries": memory["temporaries"],
        f"peak, of {of_bytes(room)}": memory["peak"],
    }
    out = {key: (n, of_bytes(n)) for key, n in out.items()}
    fits = f"fits, {of_bytes(memory['left'])} left" if memory["left"] >= 0 else f"{of_bytes(-memory['left'])} too much"
    out["memory"] = (math.nan, fits)
    if "flops" in step:
        out["GFLOP"] = (step["flops"], f"{step['flops'] / 1e9:,.1f}")
        share = step["model_flops"] / step["flops"] if step["flops"] else math.nan
        out["model FLOPs over compiled"] = (math.nan, f"{share:.3f}")
        out["bytes"] = (step["bytes"], of_bytes(step["bytes"]))
        for kind, one in step["collectives"].items():
            out[f"{kind}, sent"] = (one["bytes"], f"{of_bytes(one['bytes'])} in {one['runs']:,.0f}")
        for kind, seconds in step["seconds"].items():
            out[f"{kind}, at peak"] = (seconds, of_seconds(seconds))
        out["a step, at least"] = (max(step["seconds"].values()), of_seconds(max(step["seconds"].values())))
        out["bound by"] = (math.nan, step["bound"])
    out["compiled in"] = (math.nan, of_seconds(step["compile_seconds"]))
    return out


def table(columns: dict[str, dict], over_first=False) -> str:
    """Markdown. columns: {title: rows}."""
    keys = dict.fromkeys(key for rows in columns.values() for key in rows)
    first = next(iter(columns.values()))
    lines = ["| a device | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    for key in keys:
        cells = []
        for rows in columns.values():
            number, told = rows.get(key, (math.nan, "–"))
            base = first.get(key, (math.nan,))[0]
            ratio = number / base if over_first and rows is not first and base else math.nan
            cells.append(told + (f" (× {ratio:.3f})" if math.isfinite(ratio) else ""))
        lines.append(f"| {key} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def report(out) -> str:
    n = out["parameters"]
    mesh = " · ".join(f"{axis} {size}" for axis, size in out["mesh"].items() if size > 1) or "one device"
    steps = out["steps"].items()
    lines = [
        f"{out['config']} on {out['topology']}: {out['devices']} devices, {mesh}",
        f"encoding {out['encoding'].get('preset', out['encoding']['name'])}; parameters {n['total']:,} (encoding "
        f"{n['encoding']:,})\n",
        table({f"{name}, {step['batch']:,} rows": rows_of(step) for name, step in steps}),
        *notes(out),
    ]
    return "\n".join(lines)


def notes(out):
    for name, step in out["steps"].items():
        for kernel, runs in step.get("uncounted_kernels", {}).items():
            yield f"{name}: {runs:,.0f} runs of {kernel} are in no count"
        if step.get("open_loops"):
            yield f"{name}: {step['open_loops']} loops of unknown length are counted once"
        if step["memory"]["left"] < 0:
            over, room = -step["memory"]["left"], step["memory"]["peak"] + step["memory"]["left"]
            yield f"does not fit: {name} needs {of_bytes(over)} more than the {of_bytes(room)} of a device"
    if out["remedies"]:
        yield "what may help: " + "; ".join(out["remedies"])


def compare(spec, overrides, topology, names, quick):
    """One measurement an encoding, of the config that its file makes with it."""
    for name in names:
        path, arg = config.split_spec(spec)
        full = f"{path}:{','.join(filter(None, (arg, f'encoding={name}')))}"
        settings = config.validate(config.apply_overrides(config.load(full), overrides))
        print(f"{name} …", file=sys.stderr, flush=True)
        yield measure(settings, full, topology, quick)


def main(_):
    FLAGS = flags.FLAGS
    settings, spec, overrides = cli.parsed_config()
    chips.prepare(FLAGS.topology, FLAGS.quick)
    if FLAGS.compare:
        found = list(compare(spec, overrides, FLAGS.topology, FLAGS.compare, FLAGS.quick))
        print("\n\n".join(map(report, found)) + "\n\nthe training step, over the first:\n")
        columns = {}
        for name, out in zip(FLAGS.compare, found, strict=True):
            n = out["parameters"]["total"]
            columns[name] = {"parameters": (n, f"{n:,}")} | rows_of(out["steps"]["train"])
        print(table(columns, over_first=True))
    else:
        found = [measure(settings, spec, FLAGS.topology, FLAGS.quick)]
        print(report(found[0]))
    if FLAGS.json:
        text = json.dumps(found if FLAGS.compare else found[0], indent=1, default=list)
        Path(FLAGS.json).write_text(text + "\n")
    if not all(out["fits"] for out in found):
        sys.exit(1)


if __name__ == "__main__":
    cli.define_config()
    flags.DEFINE_string("topology", None, "CHIP:SHAPE, as v5e:16x16 or h200:8")
    flags.DEFINE_list("compare", [], "encodings to put side by side")
    flags.DEFINE_bool("quick", False, "a compiler that searches less")
    flags.DEFINE_string("json", "", "write the numbers there too")
    cli.run_main(main)
