"""results/preflight.{json,md}: every config compiled for chips that are not there, and a dozen encodings of two models.

    python scripts/preflight_all.py [--only TEXT] [--thorough] [--print]

One point after the other as `python -m jojax.preflight --quick`, the records written after each: a second call goes on
where the first was stopped, and compiles again what a config file has changed. `--thorough` leaves the compiler all its
searching (minutes a point), also for points that are done without. Points whose compiler is not installed are left for
another time (the extras tpu and cuda).
"""

import argparse
import hashlib
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flax import traverse_util  # noqa: E402

from jojax import chips, cli, config, preflight, writer  # noqa: E402 — the repository's own package, installed or not
from jojax.errors import UserError  # noqa: E402
from scripts.prepare.work import write_whole  # noqa: E402
from scripts.tables import page  # noqa: E402

RECORDS = ROOT / "results" / "preflight.json"
VISION = ("rope_axial", "rope_axial_qkv", "none", "learned", "rope_mixed", "rope_mixed_qkv", "rel_bias_2d", "alibi_2d")
VISION += ("comrope_ld", "liere", "grape_m_2d", "jo_projected_2d")
TEXT = ("rope", "jo_fixed", "jo_projected", "jo_projected_qk", "none", "alibi", "fox", "grape_m_freq", "grape_m_ctx")
TEXT += ("grape_ap_strict", "jo_blocks", "householder", "fire")
SLICES = ("16x16", "8x16", "8x8", "4x8", "4x4", "2x4", "2x2")  # of a v5e pod
LARGE = ["--config.mesh.data=1", "--config.mesh.fsdp=32", "--config.mesh.sequence=2"]  # 480 rows are not for 64 chips


def points():
    """(spec, overrides, topology)"""
    for path in sorted((ROOT / "configs").glob("*.py")):
        spec = f"configs/{path.name}"
        if hasattr(config.module(str(path)), "get_config"):
            yield from both(spec)
    for spec, encodings in (
        ("configs/imagenet_vits.py:", VISION),
        ("configs/length_extrapolation.py:size=owt16,", TEXT),
    ):
        for encoding in encodings:
            yield from both(f"{spec}encoding={encoding}")
    yield "configs/grape_llama.py", ["--config.mesh.sequence=8"], "v5e:16x16"
    yield "configs/grape_llama.py:size=large", LARGE, "v5p:4x4x4"


def both(spec):
    """On the largest part of a v5e pod, and of a node of H200s, that the batch can be split over."""
    rows = config.load(str(ROOT / spec)).batch_size
    fitting = [shape for shape in SLICES if rows % math.prod(map(int, shape.split("x"))) == 0]
    if fitting:
        yield spec, [], f"v5e:{fitting[0]}"
    yield spec, [], f"h200:{max(n for n in (1, 2, 4, 8) if rows % n == 0)}"


def digest(spec, given):
    """Of the config that is compiled, but for what is off: a key more does not change those that leave it so."""
    made = config.load(str(ROOT / spec))
    config.apply_overrides(made, cli.options(option.removeprefix("--config.") for option in given))
    flat = traverse_util.flatten_dict(writer.plain(made), sep=".")
    told = json.dumps({key: value for key, value in flat.items() if value}, sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def table(records):
    """Markdown; times of a step also over those of the first row of the same model and chips."""
    heads = ("config", "chips", "parameters", "peak", "of memory", "GFLOP", "model's share", "GiB moved", "MiB sent")
    heads += ("step at least", "over the first", "bound by", "compiled in")
    rows, first = [[*heads]], {}
    for key, out in records.items():
        step, memory = out["steps"]["train"], out["steps"]["train"]["memory"]
        share = f"{memory['peak'] / (memory['peak'] + memory['left']):.0%}"
        cells = [key.rpartition(" on ")[0], out["topology"], f"{out['parameters']['total']:,}"]
        cells += [preflight.of_bytes(memory["peak"]), share if out["fits"] else f"{share}, does not fit"]
        if "flops" in step:
            sent = sum(one["bytes"] for one in step["collectives"].values())
            least = max(step["seconds"].values())
            base = first.setdefault((out["config"].partition("encoding=")[0], out["topology"]), least)
            cells += [f"{step['flops'] / 1e9:,.1f}", f"{step['model_flops'] / step['flops']:.3f}"]
            cells += [f"{step['bytes'] / 2**30:,.2f}", f"{sent / 2**20:,.1f}", preflight.of_seconds(least)]
            cells += [f"{least / base:.3f}", step["bound"]]
        else:
            cells += ["–"] * 7
        quick = ", quick" if out["quick"] else ""
        rows.append([*cells, f"{step['compile_seconds']:.0f} s{quick}"])
    return page.table(rows) + "\n"


def ratios(records):
    """Markdown: what each encoding takes over the first of the same model and chips."""
    heads = ("encoding", "model", "chips", "FLOPs", "bytes", "peak", "step at least")
    rows, first = [[*heads]], {}
    for out in records.values():
        model, _, encoding = out["config"].partition("encoding=")
        step = out["steps"]["train"]
        if not encoding or "flops" not in step:
            continue
        now = step["flops"], step["bytes"], step["memory"]["peak"], max(step["seconds"].values())
        base = first.setdefault((model, out["topology"]), now)
        cells = [f"{a / b:.3f}" for a, b in zip(now, base, strict=True)]
        model = model.removeprefix("configs/").rstrip(":,")
        rows.append([encoding, model, out["topology"], *cells])
    return page.table(rows) + "\n"


HEAD = """# What the configs need, by the compiler

A device's share of a training step, compiled without the chips by scripts/preflight_all.py; what the columns mean and
how they are counted stands in jojax/preflight.py. Times are the least there can be, not measurements; of chunked
attention no block counts as skipped. Of fused kernels the FLOPs are in no count, so the model's share exceeds 1 there.

"""
ENCODINGS = """
## Encodings, over the first of the same model and chips

Rotating values too (`_qkv`, jo_fixed over rope) adds no product of matrices, only passes over arrays that are there:
one for values and one for the way home, forwards and backwards; where the compiler packs a kernel's inputs anyway
(H200) they come with that for nothing. Projected angles (jo_projected) add the products that make them and, from block
to block, angles of float32 that are stored for the way back: more bytes than FLOPs. Biases by pairs of sites (grape_ap,
fire) keep attention from the fused kernels; matrices of other kinds (householder, jo_blocks) are stored for each site.

"""


def write(records):
    write_whole(RECORDS, json.dumps(records, indent=1) + "\n")
    write_whole(RECORDS.with_suffix(".md"), HEAD + table(records) + ENCODINGS + ratios(records))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="points whose name has this text")
    parser.add_argument("--thorough", action="store_true", help="let the compiler search as it does by default")
    parser.add_argument("--print", action="store_true", help="show the points and compile nothing")
    args = parser.parse_args()
    todo = {" ".join((spec, *given, "on", topology)): (spec, given, topology) for spec, given, topology in points()}
    records = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
    failed = []
    for key, (spec, given, topology) in todo.items():
        if args.only not in key:
            continue
        record, now = records.get(key), digest(spec, given)
        done = record and record.get("digest", now) == now and not (args.thorough and record["quick"])
        state = "done" if done else chips.missing(topology) or "to do"
        print(f"{key}: {state}", flush=True)
        if args.print or state != "to do":
            continue
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [
                "-m",
                "jojax.preflight",
                f"--config={spec}",
                *given,
                *([] if args.thorough else ["--quick"]),
                f"--topology={topology}",
                f"--json={file.name}",
            ]
            code = subprocess.run(
                [sys.executable, *command], cwd=ROOT, stdout=subprocess.DEVNULL, check=False
            ).returncode
            if code in (0, 1) and (text := Path(file.name).read_text()):
                records[key] = json.loads(text) | {"digest": now}
                write({k: records[k] for k in todo if k in records})
            else:
                failed.append(key)
    if failed:
        sys.exit("failed:\n  " + "\n  ".join(failed))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
