"""What a machine without a network lacks, in one folder: packages as wheels, text and its tokenizer.

    python scripts/bench/carry.py gather [FOLDER] [--data data] [--python 3.12] [--limit 64]
    python scripts/bench/carry.py install FOLDER TARGET

- gather, where there is a network and jojax is installed: FOLDER (build/gpu) gets wheels for x86-64 Linux of what
  pyproject.toml asks for, in the versions of requirements.lock, without what a machine for JAX has anyway (THERE, and
  all that it needs); the English novels, as scripts/prepare_data.py eltec_eng leaves them in data/; a tokenizer for
  them of length_extrapolation's size. With the repository it must not exceed --limit MiB
- install, there: puts those wheels into TARGET (for PYTHONPATH) that this Python has not, or not in a version that
  does; jax itself is never among them
"""

import argparse
import email
import filecmp
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "build" / "gpu"
THERE = ("jax", "flax", "optax", "orbax-checkpoint", "matplotlib", "pillow", "safetensors", "tokenizers")
THERE += ("pyarrow", "pytest")  # large; of the tests
# of these a wheel is carried too, in case that the version there does not do
SPARE = {"flax", "optax", "orbax-checkpoint", "etils", "absl-py", "pytest", "pluggy", "iniconfig", "six"}
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17)] + ["manylinux2014_x86_64"]
MIB = 2**20


def wanted():
    """Of pyproject.toml, and what tests/ needs to be imported."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        return [*tomllib.load(file)["project"]["dependencies"], "pytest"]


def walk(requirements, needs, **environment):
    """Each requirement and all that it asks for; `needs` (name) -> the requirements of a package."""
    todo, seen = [Requirement(text) for text in requirements], set()
    while todo:
        one = todo.pop()
        if str(one) in seen:
            continue
        seen.add(str(one))
        yield canonicalize_name(one.name), one
        for more in map(Requirement, needs(canonicalize_name(one.name))):
            asked = [{"extra": extra} | environment for extra in ("", *one.extras)]
            if more.marker is None or any(more.marker.evaluate(given) for given in asked):
                todo.append(more)


def installed(name):
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []


# ------------------------------------------------------------------------------------------ where there is a network
def download(name, version, folder, python):
    """A wheel for the other machine; one of pure Python is built here where there is none."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    one = ["--no-deps", f"{name}=={version}"]
    target = ["--python-version", python, "--implementation", "cp"]
    target += [part for platform in PLATFORMS for part in ("--platform", platform)]
    fetch = [*pip, "download", "--only-binary=:all:", *target, "-d", folder, *one]
    if subprocess.run(fetch, capture_output=True, check=False).returncode == 0:
        return
    built = subprocess.run([*pip, "wheel", "-w", folder, *one], capture_output=True, text=True, check=False)
    if built.returncode or not any(wheel.name.endswith("-none-any.whl") for wheel in wheels(folder).get(name, [])):
        sys.exit(f"error: no wheel of {name} {version} for Python {python}: {built.stderr.strip()[-300:]}")


def wheels(folder):
    """{name: its files}"""
    found = {}
    for path in sorted(Path(folder).glob("*.whl")):
        found.setdefault(parse_wheel_filename(path.name)[0], []).append(path)
    return found


def packages(folder, python):
    lock = dict(line.split("==") for line in (ROOT / "requirements.lock").read_text().split())
    lock = {canonicalize_name(name): version for name, version in lock.items()}
    environment = dict(python_version=python, python_full_version=f"{python}.0")
    there = {name for name, _ in walk(THERE, installed, **environment)}
    names = {name for name, _ in walk(wanted(), installed, **environment)} - there | SPARE
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted(names):
        version = lock.get(name) or importlib.metadata.version(name)
        for path in wheels(folder).get(name, []):
            if str(parse_wheel_filename(path.name)[1]) != version:
                path.unlink()  # one version of each
        if name not in wheels(folder):
            print(f"{name} {version}", flush=True)
            download(name, version, folder, python)
    for name in wheels(folder).keys() - names:
        for path in wheels(folder)[name]:
            path.unlink()


def text(folder, source):
    """The novels and a tokenizer, trained on them as a run would."""
    from jojax import config
    from jojax.data.documents import Documents
    from jojax.data.text import BPETokenizer
    from scripts.prepare.work import write_whole

    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "valid"):
        path = source / f"eltec_eng_{split}.jsonl.xz"
        if not path.exists():
            sys.exit(f"error: {path} is missing: scripts/prepare_data.py eltec_eng makes it")
        copy = folder / path.name
        if split == "train" and not (copy.exists() and filecmp.cmp(path, copy, shallow=False)):
            (folder / "tokenizer.json").unlink(missing_ok=True)  # of another text
        shutil.copyfile(path, copy)
    if not (folder / "tokenizer.json").exists():
        size = config.load(f"{ROOT}/configs/length_extrapolation.py:size=one_layer").data.vocab
        documents = Documents(folder / "eltec_eng_train.jsonl.xz")
        print(f"tokenizer of {size:,} tokens", flush=True)
        tokenizer = BPETokenizer.train((documents[i] for i in range(len(documents))), size)
        write_whole(folder / "tokenizer.json", tokenizer.json)


def gather(given):
    sys.path.insert(0, str(ROOT))
    from jojax import result
    from scripts.prepare.work import write_whole

    packages(given.folder / "wheels", given.python)
    text(given.folder / "data", given.data)
    commit, dirty = result.source_version()
    names = sorted(path.name for path in (given.folder / "wheels").iterdir())
    write_whole(given.folder / "carried.json", json.dumps(dict(commit=commit, dirty=dirty, wheels=names), indent=1))
    listed = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"]
    tracked = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0")
    sizes = {
        f"{given.folder}/wheels, {len(names)} files": size_of((given.folder / "wheels").rglob("*")),
        f"{given.folder}/data": size_of((given.folder / "data").rglob("*")),
        "the repository, without what git ignores": size_of(ROOT / name for name in tracked if name),
    }
    for what, size in sizes.items():
        print(f"{size / MIB:6.1f} MiB  {what}")
    total = sum(sizes.values()) / MIB
    if total > given.limit:
        sys.exit(f"error: {total:.1f} MiB in all, more than --limit={given.limit}: carry less text or fewer wheels")
    print(f"{total:6.1f} MiB  in all, of {given.limit}: take the repository along, and {given.folder} with it")


def size_of(paths):
    return sum(path.stat().st_size for path in paths if path.is_file())


# --------------------------------------------------------------------------------------- where there is none
def metadata(wheel):
    with zipfile.ZipFile(wheel) as file:
        name = next(n for n in file.namelist() if n.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(file.read(name))


def lacking(carried):
    """(wheels to install, requirements that nothing here meets) of what pyproject.toml asks for."""
    chosen, unmet = {}, []

    def needs(name):
        return metadata(chosen[name]).get_all("Requires-Dist", []) if name in chosen else installed(name)

    for name, one in walk(wanted(), needs):
        try:
            good = one.specifier.contains(importlib.metadata.version(name), prereleases=True)
        except importlib.metadata.PackageNotFoundError:
            good = False
        if not good and name not in chosen:
            if name in carried:
                chosen[name] = carried[name][0]
            else:
                unmet.append(str(one))
    return chosen, unmet


def install(given):
    chosen, unmet = lacking(wheels(given.folder / "wheels"))
    print(f"installing {', '.join(path.name for path in chosen.values()) or 'nothing: all is here'}", flush=True)
    if unmet:
        print(f"neither here nor carried: {', '.join(unmet)}", flush=True)
    if chosen:
        options = "-q --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check --upgrade --target"
        pip = [sys.executable, "-m", "pip", "install", *options.split(), str(given.target), *map(str, chosen.values())]
        if subprocess.run(pip, check=False).returncode:  # a wheel is an archive of what stands in site-packages
            for wheel in chosen.values():
                with zipfile.ZipFile(wheel) as file:
                    file.extractall(given.target)
    test = "from jojax import evaluate, loop, result, train; print(result.versions())"
    paths = os.pathsep.join([str(given.target), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, "-c", test], env=environment, check=False).returncode


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    first = commands.add_parser("gather")
    first.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    first.add_argument("--data", type=Path, default=ROOT / "data")
    first.add_argument("--python", default="3.12")
    first.add_argument("--limit", type=float, default=64.0)
    first.set_defaults(run=gather)
    second = commands.add_parser("install")
    second.add_argument("folder", type=Path)
    second.add_argument("target", type=Path)
    second.set_defaults(run=install)
    given = parser.parse_args()
    return given.run(given)


if __name__ == "__main__":
    sys.exit(main())
