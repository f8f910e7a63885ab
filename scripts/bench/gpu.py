"""One run on one GPU that may not come again: kernels, step times, a short training, each stage whatever befell the one
before.

    scripts/bench/gpu.sh [--out FOLDER] [--carry build/gpu] [--minutes 8] [--tiny]

1. install: what lacks, from the folder that `gpu.sh gather` made (scripts/bench/carry.py)
2. kernels: cuDNN's, chunked and plain attention against the plain formula (scripts/bench/kernels.py)
3. pace: steps of the model that 6. trains, with its input, which say how many it can do
4. vit_s, 5. lm_c768: step time and utilisation with each encoding, bfloat16, one batch on the device
   (scripts/bench/train_step.py)
6. extrapolation: length_extrapolation's one layer with rope and with jo_projected, trained side by side for as many
   steps as the time left allows, then read at the lengths

FOLDER (results/gpu_run, or $OUT): run.json (device, versions, what became of each stage), run.log, kernels.json,
steps.json, and a record of each trained model; all but the log are written whole, each as soon as there is something.
A stage has a share of the time; what it does not use is left for the last. --tiny: every stage at a small size on a
CPU, to try this program.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from scripts.prepare.work import write_whole  # noqa: E402

SHARES = {"install": 0.2, "kernels": 0.16, "pace": 0.12, "vit_s": 0.15, "lm_c768": 0.2}
LEAST = 10  # seconds, without which a stage is not begun
# steps without an own measurement are taken to last so long; what a training needs beside its steps: start, text,
# compiling, evaluation
ASSUMED, BESIDE = 0.02, 90
TRAINED = ("rope", "jo_projected")
VISION = ("rope_axial", "rope_axial_qkv", "jo_projected_2d", "comrope_ld")
TEXT = ("rope", "jo_fixed", "jo_projected", "fox", "grape_ap")
PROBE = "import jax; print(jax.__version__, jax.devices()[0].platform, jax.devices()[0].device_kind, sep='\\n')"
SMALL = {"model.width": 48, "model.heads": 2, "model.depth": 1}
SITES = {"data.length": 16, "data.tokenizer": "bytes", "data.vocab": 257}


class Run:
    def __init__(self, given, work):
        self.out, self.carry, self.tiny, self.work = given.out, given.carry, given.tiny, work
        self.start = time.monotonic()
        self.seconds = 60 * given.minutes
        self.stages: dict[str, dict[str, Any]] = {}
        self.record: dict[str, Any] = dict(state="running", tiny=self.tiny, minutes=given.minutes, stages=self.stages)
        cache = os.environ.get("JOJAX_CACHE") or str(work / "cache")
        self.env = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"} | {
            "PYTHONPATH": os.pathsep.join([str(work / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "PYTHONUNBUFFERED": "1",
            "JOJAX_CACHE": cache,
            "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR") or f"{cache}/compiled",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.85",
        }
        if self.tiny:
            flags = os.environ.get("XLA_FLAGS", "--xla_backend_optimization_level=0")
            self.env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}

    def left(self):
        return self.seconds - (time.monotonic() - self.start)

    def save(self, **more):
        self.record |= more | {"seconds": time.monotonic() - self.start}
        write_whole(self.out / "run.json", json.dumps(self.record, indent=1) + "\n")

    def note(self, name, state, **more):
        print(f"== {name}: {state}, {self.left():.0f} s left", flush=True)
        self.stages[name] = self.stages.get(name, {}) | {"state": state} | more
        self.save()

    def stage(self, name, *commands, seconds=None, env=(), after=lambda: None):
        """Side by side, each ended by the stage's limit, `after` each; whatever happens is noted. -> was it begun?"""
        limit = int(min(seconds or SHARES[name] * self.seconds, self.left()))
        if limit < LEAST:
            self.note(name, "not run: no time is left")
            return False
        print(f"== {name}, at most {limit} s", flush=True)
        start, env = time.monotonic(), self.env | dict(env)
        timed = ["timeout", "-k", "5", str(limit)]
        commands = [[*timed, sys.executable, *map(str, command)] for command in commands]
        codes = []
        for process in [subprocess.Popen(one, cwd=ROOT, env=env) for one in commands]:
            codes.append(process.wait())
            after()
        over = {124, 137, -9} & set(codes)
        state = "out of time" if over else f"failed, exit codes {codes}" if any(codes) else "done"
        self.note(name, state, seconds=time.monotonic() - start, limit=limit)
        return True

    def probe(self):
        """The device's name, or SystemExit before anything is written: without a GPU this is not worth its time."""
        ask = ["timeout", "90", sys.executable, "-c", PROBE]
        found = subprocess.run(ask, env=self.env, capture_output=True, text=True, check=False)
        if found.returncode:
            sys.exit(f"error: jax does not start here: {(found.stderr.strip().splitlines() or ['no word'])[-1]}")
        version, platform, kind = found.stdout.strip().splitlines()[-3:]
        if platform != "gpu" and not self.tiny:
            sys.exit(f"error: no GPU: jax {version} finds {kind!r} alone; --tiny tries this program on a CPU")
        names = {d.name.lower(): d.version for d in importlib.metadata.distributions() if d.name}
        libraries = {name: names[name] for name in sorted(names) if name.startswith(("jax", "nvidia-", "flax"))}
        smi = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        try:
            driver = subprocess.run(smi, capture_output=True, text=True, timeout=20, check=False).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            driver = ""
        carried = self.carry / "carried.json"
        self.out.mkdir(parents=True, exist_ok=True)
        for name in ("kernels", "steps", *TRAINED):  # of an earlier run
            (self.out / f"{name}.json").unlink(missing_ok=True)
        self.save(
            device=kind,
            nvidia_smi=driver,
            python=sys.version.split()[0],
            libraries=libraries,
            carried=json.loads(carried.read_text()) if carried.exists() else None,
        )

    # -------------------------------------------------------------------------------------------------- stages
    def steps(self, name, model, encodings, *options, tiny=()):
        """Of scripts/bench/train_step.py; what of it is not there is told."""
        if self.tiny:
            encodings = encodings[:1]
            options = ["--steps=2", "--product=256", *(f"--set={k}={v}" for k, v in dict(tiny).items())]
        elif model.startswith("lm") and (self.carry / "data" / "tokenizer.json").exists():
            options = [*options, f"--set=data.tokenizer={self.carry}/data/tokenizer.json"]
        script = ["scripts/bench/train_step.py", model, "--forms=bf16", f"--json={self.out}/steps.json", *options]
        begun = self.stage(name, [*script, f"--encodings={','.join(encodings)}"])
        done = {row["encoding"] for row in self.rows(model)}
        missing = [encoding for encoding in encodings if encoding not in done]
        if begun and missing:
            self.note(name, f"{self.stages[name]['state']}; not run: {', '.join(missing)}")

    def rows(self, model):
        path = self.out / "steps.json"
        rows = json.loads(path.read_text())["rows"] if path.exists() else []
        return [row for row in rows if row["model"] == model]

    def extrapolate(self):
        """Two at a time: a step of both takes about as long as one of each."""
        found = {row["encoding"]: row["seconds"] for row in self.rows("lm_layer") if "seconds" in row}
        pace = {encoding: found.get(encoding, ASSUMED) for encoding in TRAINED}
        steps = int(0.8 * (self.left() - BESIDE) / sum(pace.values())) // 50 * 50
        steps = min(2 if self.tiny else 50_000, steps)
        if steps < 1:
            self.note("extrapolation", f"not run: {self.left():.0f} s are left, too few for a training")
            return
        data, lengths = self.carry / "data", "(512, 2048, 8192)"
        changes = {"data.path": "", "steps": steps, "eval.diagnostics": 0, "eval.lengths": lengths}
        if self.tiny:
            changes |= SMALL | SITES | {"batch_size": 4, "eval.lengths": "(16, 32)", "eval.document_tokens": 64}
            changes |= {"data.source": "wikipedia_excerpt"}
        elif data.exists():
            paths = {f"data.{split}_path": data / f"eltec_eng_{split}.jsonl.xz" for split in ("train", "valid")}
            changes |= paths | {"data.source": "text", "data.tokenizer": data / "tokenizer.json"}
            changes["eval.document_tokens"] = 16_384
        else:  # short articles
            changes |= {"data.source": "wikipedia_excerpt", "eval.lengths": "(512, 2048)"}
        options = [f"--config.{key}={value}" for key, value in changes.items()]
        config = "configs/length_extrapolation.py:size=one_layer,encoding="
        commands = [
            ["-m", "jojax.train", "--config", config + name, "--workdir", self.work / name, *options]
            for name in TRAINED
        ]
        half = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.42"}
        states = dict.fromkeys(TRAINED, "no record")

        def keep():
            for name in TRAINED:
                path = self.work / name / "result.json"
                if path.exists():
                    write_whole(self.out / f"{name}.json", text := path.read_text())
                    states[name] = json.loads(text)["state"]

        self.stage("extrapolation", *commands, seconds=self.left(), env=half, after=keep)
        told = "two at a time on one device: their wall_seconds are no measurement"
        more = dict(steps=steps, seconds_a_step=pace, measured=sorted(found), records=states, how=told)
        self.stages["extrapolation"] |= more

    def all(self):
        print(f"== {self.record['device']}, {self.record['libraries'].get('jax')}", flush=True)
        carry = "scripts/bench/carry.py"
        if self.carry.exists() or self.tiny:
            self.stage("install", [carry, "install", self.carry, self.work / "site"])
        else:
            self.note("install", f"not run: {self.carry} is not there")
        tiny = ["--tiny"] if self.tiny else []
        self.stage("kernels", ["scripts/bench/kernels.py", f"--json={self.out}/kernels.json", *tiny])
        text = SMALL | SITES
        size = ["--product=16384", "--together=3"]
        self.steps("pace", "lm_layer", TRAINED, "--steps=100", "--scale=8", *size, tiny=text)
        steps = ["--steps=30", "--resident", *size]
        plain = ["--set=data.augment.rand=", "--set=data.augment.erase=0.0"]  # one batch stands for all: be quick
        image = SMALL | {"data.image_size": 32, "model.drop_path": 0.0}
        self.steps("vit_s", "vit_s", VISION, "--scale=128", *plain, *steps, tiny=image)
        self.steps("lm_c768", "lm_c768", TEXT, "--scale=16", *steps, tiny=text)
        self.extrapolate()
        states = {name: stage["state"] for name, stage in self.stages.items()}
        self.save(state="finished")
        print("\n".join(f"{name}: {state}" for name, state in states.items()))
        return int(any(state != "done" for state in states.values()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out = Path(os.environ.get("OUT") or ROOT / "results" / "gpu_run")
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--carry", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    given.out, given.carry = given.out.resolve(), given.carry.resolve()
    with tempfile.TemporaryDirectory(prefix="jojax-gpu-") as work:
        run = Run(given, Path(work))
        run.probe()
        with logged(given.out / "run.log"):
            return run.all()


@contextlib.contextmanager
def logged(path):
    """What this process and its children say goes to the terminal and to a file."""
    tee = subprocess.Popen(["tee", str(path)], stdin=subprocess.PIPE)
    assert tee.stdin is not None
    before = [os.dup(number) for number in (1, 2)]
    try:
        for number in (1, 2):
            os.dup2(tee.stdin.fileno(), number)
        tee.stdin.close()
        yield
    finally:
        sys.stdout.flush()
        for number, old in zip((1, 2), before, strict=True):
            os.dup2(old, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            tee.wait(5)  # a child that outlived its stage may hold the pipe
        tee.kill()


if __name__ == "__main__":
    sys.exit(main())
