"""ImageNet-1K from its tars, class folders, Kaggle's layout or parquet; the bytes of the images stay as they are.

The label is the rank of the wnid among the sorted wnids of train. It is not ILSVRC2012_ID, which the devkit counts in.
"""

import csv
import io
import sys
import tarfile

from jojax.data.folder import subfolders
from jojax.errors import UserError
from scripts.prepare.files import image_rows, parquet_files, parquet_names, parquet_rows
from scripts.prepare.images import Source
from scripts.prepare.work import Bad, fingerprint

TRAIN, VALID = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12"
TRUTH = f"{DEVKIT}/data/ILSVRC2012_validation_ground_truth.txt"
WHERE = (
    f"ImageNet needs an account: {TRAIN}, {VALID} and {DEVKIT}.tar.gz from https://image-net.org/download-images, or "
    "imagenet-object-localization-challenge from Kaggle, or the parquet files of ILSVRC/imagenet-1k from the hub"
)


def source(root):
    """The Source of whichever of the four layouts lies in a folder. UserError where none does."""
    if not root.is_dir():
        raise UserError(f"{root} is no folder. {WHERE}")
    kaggle = next((p for p in (root / "ILSVRC" / "Data" / "CLS-LOC", root / "Data" / "CLS-LOC") if p.is_dir()), None)
    if (root / TRAIN).is_file():
        return _tars(root)
    if kaggle:
        answers = _kaggle_answers(next(iter(sorted(root.rglob("LOC_val_solution.csv"))), None), root)
        return _folders("kaggle", kaggle / "train", kaggle / "val", answers)
    if any(root.rglob("*.parquet")):
        return _parquet(root)
    valid = next((root / n for n in ("val", "valid", "validation") if (root / n).is_dir()), None)
    if (root / "train").is_dir() and valid:
        return _folders("folders", root / "train", valid, None)
    raise UserError(f"{root} holds neither {TRAIN}, train/ and val/, ILSVRC/ nor *.parquet. {WHERE}")


def _source(layout, marks, wnids, splits):
    if len(wnids) != 1000:
        print(f"note: {len(wnids)} classes, not 1,000", file=sys.stderr)
    features = {
        "image": ("image", (None, None, 3)),
        "file_name": ("text",),
        "label": ("label", len(wnids), wnids if isinstance(wnids, list) else None),
    }
    return Source({"dataset": "imagenet2012", "layout": layout, "source": marks}, features, splits)


def _member(name, data, label):
    return name, {"file_name": name, "image": data, "label": label}


# ------------------------------------------------------------------------------------------------ tars
def _tars(root):
    if not (root / VALID).is_file():
        raise UserError(f"{root} has no {VALID}. {WHERE}")
    with _tar(root / TRAIN) as archive:
        inner = {m.name.rpartition("/")[2].removesuffix(".tar"): m for m in _listed(archive, root / TRAIN)}
    wnids = sorted(inner)
    rank = {wnid: i for i, wnid in enumerate(wnids)}
    truth = _ground_truth(root)
    if strange := sorted(set(truth) - set(wnids)):
        raise UserError(f"the devkit's ground truth has the class {strange[0]}, which {TRAIN} has not")

    def train():
        with _tar(root / TRAIN) as archive:
            for wnid in wnids:
                file = archive.extractfile(inner[wnid])
                try:
                    with tarfile.open(fileobj=file) as classes:
                        for member in classes:
                            data = classes.extractfile(member)
                            yield _member(member.name, data.read() if data else b"", rank[wnid])
                except (tarfile.TarError, OSError, EOFError) as error:
                    raise UserError(f"{wnid}.tar in {root / TRAIN} is damaged ({error}): get the tar again") from error

    def valid():
        with _tar(root / VALID) as archive:
            for member in sorted(_listed(archive, root / VALID), key=lambda m: m.name):
                data = archive.extractfile(member)
                name = member.name.rpartition("/")[2]
                number = name.removesuffix(".JPEG").rpartition("_")[2]
                if not number.isdigit() or not 1 <= int(number) <= len(truth):
                    yield Bad(name, f"the ground truth has {len(truth):,} lines and none for it")
                else:
                    yield _member(name, data.read() if data else b"", rank[truth[int(number) - 1]])

    marks = fingerprint([root / TRAIN, root / VALID])
    return _source("tars", marks, wnids, {"train": train, "validation": valid})


def _tar(path):
    try:
        return tarfile.open(path)
    except (tarfile.TarError, OSError) as error:
        raise UserError(f"{path} is no tar that can be read ({error}): get it again. {WHERE}") from error


def _listed(archive, path):
    try:
        return [m for m in archive.getmembers() if m.isfile()]
    except (tarfile.TarError, OSError, EOFError) as error:
        raise UserError(f"{path} is cut short or damaged ({error}): get it again. {WHERE}") from error


def _ground_truth(root):
    """[wnid] of validation images 1, 2, …, from the devkit: meta.mat says which wnid an ILSVRC2012_ID means."""
    import scipy.io

    found = {}
    for name in (TRUTH, f"{DEVKIT}/data/meta.mat"):
        if (root / name).is_file():
            found[name] = (root / name).read_bytes()
    archive = root / f"{DEVKIT}.tar.gz"
    if len(found) < 2 and archive.is_file():
        with _tar(archive) as devkit:
            for member in _listed(devkit, archive):
                file = devkit.extractfile(member)
                found[member.name] = file.read() if file else b""
    truth, meta = found.get(TRUTH), found.get(f"{DEVKIT}/data/meta.mat")
    if truth is None or meta is None:
        raise UserError(f"{root} has no {DEVKIT}.tar.gz, which knows the classes of the validation images. {WHERE}")
    synsets = scipy.io.loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
    wnid = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets.ravel()}
    try:
        return [wnid[int(line)] for line in truth.split()]
    except (KeyError, ValueError) as error:
        raise UserError(f"the devkit's ground truth names an ILSVRC2012_ID that meta.mat lacks ({error})") from error


# ------------------------------------------------------------------------------------------------ folders
def _folders(layout, train, valid, answers):
    """answers: {name without .JPEG: wnid} where the validation images lie flat."""
    if not train.is_dir():
        raise UserError(f"{train} is no folder. {WHERE}")
    wnids = subfolders(train)
    rank = {wnid: i for i, wnid in enumerate(wnids)}

    def in_classes(folder):
        for wnid in subfolders(folder):
            if wnid not in rank:
                raise UserError(f"{folder} has the class {wnid}, which {train} has not")
            for file in _images(folder / wnid):
                yield _member(file.name, file.read_bytes(), rank[wnid])

    def flat():
        for file in _images(valid):
            wnid = answers.get(file.stem)
            if wnid not in rank:
                yield Bad(file.name, f"LOC_val_solution.csv gives it the class {wnid}")
            else:
                yield _member(file.name, file.read_bytes(), rank[wnid])

    splits = {
        "train": lambda: in_classes(train),
        "validation": flat if answers is not None else lambda: in_classes(valid),
    }
    return _source(layout, fingerprint(sorted(train.iterdir())), wnids, splits)


def _images(folder):
    """Files in the order of their names; hidden ones and text are none."""
    return sorted(p for p in folder.iterdir() if p.is_file() and p.suffix.lower() in (".jpeg", ".jpg", ".png"))


def _kaggle_answers(path, root):
    if path is None:
        raise UserError(
            f"{root} has no LOC_val_solution.csv, which knows the classes of the validation images. {WHERE}"
        )
    with path.open(newline="") as file:
        return {row["ImageId"]: row["PredictionString"].split()[0] for row in csv.DictReader(file)}


# ------------------------------------------------------------------------------------------------ parquet
def _parquet(root):
    """The hub's labels are those ranks already."""
    files = parquet_files(root)
    valid = next((s for s in ("validation", "val", "valid") if s in files), None)
    if "train" not in files or valid is None:
        raise UserError(f"{root} has parquet files of {', '.join(files)}, but train and validation are needed. {WHERE}")
    names = parquet_names(files["train"][0], "label")
    count = len(names) if names else 1 + max(r["label"] for _, r in parquet_rows(files["train"], ("label",)))

    def members(split):
        for member in image_rows(files[split], "image", {"label": ("label", count)}):
            yield member if isinstance(member, Bad) else (member[0], member[1] | {"file_name": member[0]})

    marks = fingerprint([p for s in ("train", valid) for p in files[s]])
    splits = {"train": lambda: members("train"), "validation": lambda: members(valid)}
    return _source("parquet", marks, range(count), splits)
