"""Images as a TFDS data set in ArrayRecord files, written without TensorFlow."""

import importlib
import pathlib
from typing import Any

from jojax.data.image import decode
from jojax.errors import UserError
from scripts.prepare.work import Bad, Work, ordered


def prepare(out, name, version, source, args):
    """DIR/NAME/VERSION from a source of images.

    source: plan, features (name -> ('image', shape), ('label', count, names or None) or ('text',)), and
    splits: name -> function that yields (name, {feature: value}) or Bad. The bytes of an image are stored as they
    come; each is decoded once to see that it can be.
    """
    final = pathlib.Path(out) / name / version
    work = Work(final, source.plan | {"shard_mb": args.shard_mb}, args.max_bad)
    if not work.begin():
        features = _features(source.features)
        shape = source.features["image"][1]

        def process(members):
            return ordered(_check, members, args.jobs, _set_shape, (shape,))

        def write(part, results):
            return _write(work.folder, part, results, features, args.shard_mb * 1e6)

        records = {s: work.stream(s, members(), process, write) for s, members in source.splits.items()}
        _finish(work, name, features, records)
    return work


def _features(spec):
    import tensorflow_datasets as tfds

    kinds = {
        "image": lambda shape: tfds.features.Image(shape=shape),
        "label": lambda count, names: tfds.features.ClassLabel(
            **({"names": names} if names else {"num_classes": count})
        ),
        "text": lambda: tfds.features.Text(),
    }
    return tfds.features.FeaturesDict({name: kinds[kind](*rest) for name, (kind, *rest) in spec.items()})


_shape: list[Any] = [None]  # of a worker


def _set_shape(shape):
    _shape[0] = shape


def _check(members):
    return [_bad(name, example["image"]) for name, example in members]


def _bad(name, image):
    """Bad where the image can't be decoded or has another size, else None."""
    try:
        pixels = decode(image, name)
    except UserError as error:
        return Bad(name, str(error.__cause__ or error))
    wanted = _shape[0]
    if wanted[0] and pixels.shape[:2] != tuple(wanted[:2]):
        return Bad(name, f"it is {pixels.shape[1]}×{pixels.shape[0]}, not {wanted[1]}×{wanted[0]}")
    return None


def _write(folder, part, results, features, most):
    """One shard: records until `most` bytes."""
    record_module = importlib.import_module("array_record.python.array_record_module")  # compiled

    writer, count, size = None, 0, 0
    for (_, example), _ in results:
        if writer is None:
            writer = record_module.ArrayRecordWriter(str(folder / f"{part}.array_record.part"), "group_size:1")
        row = features.serialize_example(features.encode_example(example))
        writer.write(row)
        count, size = count + 1, size + len(row)
        if size >= most:
            break
    if writer is None:
        return [], {"examples": 0, "size": 0}
    writer.close()
    return [f"{part}.array_record"], {"examples": count, "size": size}


def _finish(work, name, features, records):
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import dataset_info

    kept = {split: [r for r in rows if r["files"]] for split, rows in records.items()}
    for split, rows in kept.items():
        if not rows:
            raise UserError(f"the {split} split has no image that can be used")

    def final_name(file):
        split, _, number = file.removesuffix(".array_record").rpartition("-")
        return f"{name}-{split}.array_record-{number}-of-{len(kept[split]):05d}"

    def metadata(folder):
        identity = dataset_info.DatasetIdentity(
            name=name, version=tfds.core.Version(work.final.name), data_dir=str(folder), module_name=""
        )
        info = tfds.core.DatasetInfo(builder=identity, features=features)
        info.set_file_format("array_record")
        template = tfds.core.ShardedFileTemplate(data_dir=folder, dataset_name=name, filetype_suffix="array_record")
        splits = [
            tfds.core.SplitInfo(
                name=split,
                shard_lengths=[r["examples"] for r in rows],
                num_bytes=sum(r["size"] for r in rows),
                filename_template=template.replace(split=split),
            )
            for split, rows in kept.items()
        ]
        info.set_splits(tfds.core.splits.SplitDict(splits))
        info.write_to_directory(folder)

    examples = {split: sum(r["examples"] for r in rows) for split, rows in kept.items()}
    work.finish(records, {"examples": examples}, final_name, metadata)
