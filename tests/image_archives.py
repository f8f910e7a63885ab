"""Real images in the archives in which CIFAR, MNIST and ImageNet are handed on."""

import csv
import gzip
import io
import pickle
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from image_sets import encoded, fashion, write_files

WNIDS = ["n01440764", "n01443537", "n02105855"]
IDS = [3, 1, 2]  # ILSVRC2012_ID of each: not the rank


def examples(split, count):
    """[(uint8 [32, 32, 3], label)]"""
    source = fashion(split)
    return [(source[7 * i]["image"], source[7 * i]["label"]) for i in range(count)]


def tar(path, files, mode="w"):
    """{name: bytes}"""
    with tarfile.open(path, mode) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def parquet(path, columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=3)


def chw(image):
    return image.transpose(2, 0, 1).tobytes()


def cifar(folder, name, kind, sets):
    """sets: {'train': [(image, label)], 'test': …}; CIFAR-100's fine label is label + 90, CIFAR-10's the label."""
    hundred = name == "cifar100"
    files = {"train": ["train"] if hundred else [f"data_batch_{i}" for i in range(1, 6)]}
    files["test"] = ["test"] if hundred else ["test_batch"]
    top = "cifar-100" if hundred else "cifar-10"
    out = {}
    for split, rows in sets.items():
        for n, file in enumerate(files[split]):
            part = [rows[i] for i in range(len(rows)) if i * len(files[split]) // len(rows) == n]
            fine = [y + 90 if hundred else y for _, y in part]
            if kind == "binary":
                head = [bytes([y, f] if hundred else [f]) for (_, y), f in zip(part, fine, strict=True)]
                out[f"{file}.bin"] = b"".join(h + chw(x) for h, (x, _) in zip(head, part, strict=True))
            else:
                data = np.frombuffer(b"".join(chw(x) for x, _ in part), np.uint8).reshape(-1, 3072)
                content = {b"data": data, b"fine_labels" if hundred else b"labels": fine}
                content |= {b"coarse_labels": [y for _, y in part]} if hundred else {}
                out[file] = pickle.dumps(content, protocol=2)
        if kind == "parquet":
            labels = {"fine_label" if hundred else "label": [y + 90 if hundred else y for _, y in rows]}
            labels |= {"coarse_label": [y for _, y in rows]} if hundred else {}
            images = [{"bytes": encoded(x, "PNG"), "path": None} for x, _ in rows]
            parquet(folder / name / f"{split}-00000-of-00001.parquet", {"img": images} | labels)
    if kind == "parquet":
        return folder
    kind = {"pickle": "python"}.get(kind, kind)
    return tar(folder / f"{top}-{kind}.tar.gz", {f"{top}-{kind}/{n}": d for n, d in out.items()}, "w:gz")


def idx(folder, sets, packed=True):
    """28 × 28 of the middle of one channel."""
    for split, rows in sets.items():
        prefix = {"train": "train", "test": "t10k"}[split]
        images = np.stack([x[2:30, 2:30, 0] for x, _ in rows])
        for name, shape, data in (
            ("images-idx3", images.shape, images.tobytes()),
            ("labels-idx1", (len(rows),), bytes(y for _, y in rows)),
        ):
            raw = bytes([0, 0, 8, len(shape)]) + np.array(shape, ">u4").tobytes() + data
            ending = ".gz" if packed else ""
            (folder / f"{prefix}-{name}-ubyte{ending}").write_bytes(gzip.compress(raw) if packed else raw)
    return folder


def imagenet_files():
    """{'train': {wnid: {name: bytes}}, 'val': [(name, wnid, bytes)]}: JPEGs, one CMYK, one grey, one PNG so named."""
    rows = examples("train", 7)
    kinds = [("JPEG", "RGB"), ("JPEG", "CMYK"), ("JPEG", "L"), ("JPEG", "RGB"), ("PNG", "RGB"), ("JPEG", "RGB")]
    data = [encoded(image, *kind) for (image, _), kind in zip(rows, kinds, strict=False)]
    train = {w: {f"{w}_{i}.JPEG": data[2 * n + i] for i in range(2)} for n, w in enumerate(WNIDS)}
    val = [(f"ILSVRC2012_val_{i + 1:08d}.JPEG", WNIDS[w], data[5 - i]) for i, w in enumerate((2, 0, 1, 2))]
    return {"train": train, "val": val}


def imagenet(folder, layout):
    made = imagenet_files()
    train = {f"{w}/{name}": d for w, files in made["train"].items() for name, d in files.items()}
    if layout == "folders":
        val = {f"val/{w}/{name}": d for name, w, d in made["val"]}
        return write_files(folder, {f"train/{n}": d for n, d in train.items()} | val)
    if layout == "kaggle":
        top = "ILSVRC/Data/CLS-LOC"
        val = {f"{top}/val/{name}": d for name, _, d in made["val"]}
        write_files(folder, {f"{top}/train/{n}": d for n, d in train.items()} | val)
        with (folder / "LOC_val_solution.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["ImageId", "PredictionString"])
            rows.writerows([name.removesuffix(".JPEG"), f"{w} 1 2 3 4 "] for name, w, _ in made["val"])
        return folder
    if layout == "parquet":
        rank = {w: i for i, w in enumerate(WNIDS)}
        rows = [(d, n, rank[n.partition("/")[0]]) for n, d in train.items()]
        for split, part in (("train", rows), ("validation", [(d, n, rank[w]) for n, w, d in made["val"]])):
            images = [{"bytes": d, "path": n} for d, n, _ in part]
            parquet(
                folder / "data" / f"{split}-00000-of-00001.parquet", {"image": images, "label": [y for *_, y in part]}
            )
        return folder
    inner = {f"{w}.tar": tar(folder / "inner.tar", files).read_bytes() for w, files in reversed(made["train"].items())}
    tar(folder / "ILSVRC2012_img_train.tar", inner)
    tar(folder / "ILSVRC2012_img_val.tar", {name: d for name, _, d in reversed(made["val"])})
    tar(folder / "ILSVRC2012_devkit_t12.tar.gz", devkit(made["val"]), "w:gz")
    (folder / "inner.tar").unlink()
    return folder


def devkit(val):
    import scipy.io

    synsets = np.array(
        [(i, w, "words") for w, i in zip(WNIDS, IDS, strict=True)],
        dtype=[("ILSVRC2012_ID", object), ("WNID", object), ("words", object)],
    )
    file = io.BytesIO()
    scipy.io.savemat(file, {"synsets": synsets[:, None]})
    ids = dict(zip(WNIDS, IDS, strict=True))
    top = "ILSVRC2012_devkit_t12/data"
    truth = "".join(f"{ids[w]}\n" for _, w, _ in val).encode()
    return {f"{top}/meta.mat": file.getvalue(), f"{top}/ILSVRC2012_validation_ground_truth.txt": truth}
