"""Images written in every format in which they are handed on give the same examples; killed, damaged, repeated."""

import json
import pickle

import numpy as np
import pytest

import runs
from image_archives import cifar, examples, idx, imagenet, imagenet_files, tar
from image_sets import encoded
from jojax.data.source import open_source
from jojax.errors import UserError
from scripts import prepare_data
from scripts.prepare import images, work

SETS = {"train": examples("train", 15), "test": examples("test", 6)}


def prepare(name, source, out, *more, code=0):
    jobs = [] if name in prepare_data.FILES else ["--jobs", "1"]
    assert prepare_data.main([name, str(source), "--out", str(out), *jobs, *more]) == code


def read(out, name, split, classes):
    source = open_source({"source": "tfds", "path": str(out), "name": name, "classes": classes}, split)
    return [(source[i]["image"], source[i]["label"]) for i in range(len(source))]


def same(got, wanted):
    assert [y for _, y in got] == [y for _, y in wanted]
    for (a, _), (b, _) in zip(got, wanted, strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("kind", ["binary", "pickle", "parquet", "folder"])
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar(tmp_path, name, kind):
    source = cifar(tmp_path, name, {"folder": "binary"}.get(kind, kind), SETS)
    if kind == "folder":
        import tarfile

        with tarfile.open(source) as archive:
            archive.extractall(tmp_path / "open", filter="data")
        source = tmp_path / "open"
    prepare(name, source, tmp_path / "out", "--shard-mb", "0.01")
    shift, classes = (90, 100) if name == "cifar100" else (0, 10)
    for split, rows in SETS.items():
        same(read(tmp_path / "out", name, split, classes), [(x, y + shift) for x, y in rows])
    assert len(list((tmp_path / "out" / name / "3.0.2").glob("*-train.array_record-*"))) > 1


@pytest.mark.parametrize("packed", [True, False])
def test_mnist(tmp_path, packed):
    prepare("kmnist", idx(tmp_path, SETS, packed), tmp_path / "out")
    for split, rows in SETS.items():
        same(read(tmp_path / "out", "kmnist", split, 10), [(x[2:30, 2:30], y) for x, y in rows])


@pytest.mark.parametrize("layout", ["tars", "folders", "kaggle", "parquet"])
def test_imagenet(tmp_path, layout):
    """Bytes as they are, RGB when read; the label is the rank of the wnid, not ILSVRC2012_ID."""
    import tensorflow_datasets as tfds

    (tmp_path / "in").mkdir()
    prepare("imagenet2012", imagenet(tmp_path / "in", layout), tmp_path)
    builder = tfds.builder_from_directory(str(tmp_path / "imagenet2012" / "5.1.0"))
    made = imagenet_files()
    train = [(d, i) for i, files in enumerate(made["train"].values()) for d in files.values()]
    val = [(d, sorted(made["train"]).index(w)) for _, w, d in made["val"]]
    if layout == "folders":
        val.sort(key=lambda row: row[1])  # by class, then by name
    for split, wanted in (("train", train), ("validation", val)):
        stored = builder.as_data_source(split, decoders={"image": tfds.decode.SkipDecoding()})
        got = [(stored[i]["image"], int(stored[i]["label"])) for i in range(len(stored))]
        assert got == wanted
        for image, _ in read(tmp_path, "imagenet2012", split, 3):
            assert image.shape == (32, 32, 3) and image.dtype == np.uint8


def test_pickles_run_no_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "made"), "w"))

    with pytest.raises(UserError, match=r"wants to load .*open"):
        images.unpickle(pickle.dumps({b"data": Evil()}), "train")
    assert not (tmp_path / "made").exists()
    content = {b"data": np.arange(6, dtype=np.uint8).reshape(2, 3), b"labels": [1, 2]}
    for protocol in range(5):
        again = images.unpickle(pickle.dumps(content, protocol=protocol), "x")
        assert again[b"labels"] == [1, 2] and np.array_equal(again[b"data"], content[b"data"])


def test_bad_images_are_named_counted_and_too_many_fail(tmp_path, capsys):
    files = {f"train/a/{i}.JPEG": encoded(x, "JPEG") for i, (x, _) in enumerate(SETS["train"])}
    files |= {f"val/a/{i}.JPEG": d for i, d in enumerate(files.values())}
    files["train/a/3.JPEG"] = files["train/a/3.JPEG"][:300]
    for name, data in files.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(data)
    prepare("imagenet2012", tmp_path / "in", tmp_path, code=2)
    told = capsys.readouterr().err
    assert "train: 3.JPEG is left out: " in told and "1 of 15 members of train can't be used" in told
    assert not (tmp_path / "imagenet2012" / "5.1.0").exists()
    prepare("imagenet2012", tmp_path / "in", tmp_path, "--max-bad", "0.1")
    assert "1 members left out, named in index.json" in capsys.readouterr().out
    index = json.loads((tmp_path / "imagenet2012" / "5.1.0" / "index.json").read_text())
    assert index["examples"] == {"train": 14, "validation": 15} and index["streams"]["train"]["bad"][0][0] == "3.JPEG"


def test_a_record_cut_short_is_bad_and_a_tar_cut_short_an_error(tmp_path, capsys):
    source = cifar(tmp_path, "cifar100", "binary", SETS)
    source.write_bytes(source.read_bytes()[:-900])
    prepare("cifar100", source, tmp_path / "out", code=2)
    assert "cifar-100-binary.tar.gz is damaged" in capsys.readouterr().err
    record = bytes([1, 2]) + bytes(3072)
    broken = tar(
        tmp_path / "b.tar", {"train.bin": record * 20 + record[:99], "test.bin": record + bytes([99, 1]) * 1537}
    )
    prepare("cifar100", broken, tmp_path / "out", "--max-bad", "0.6")
    told = capsys.readouterr()
    assert "train.bin, image 20 is left out: its record is cut short" in told.err
    assert "test.bin, image 1 is left out: its coarse_label is 99" in told.err
    assert "train: 20 images" in told.out and "test: 1 images" in told.out


def test_killed_goes_on_and_a_second_run_does_nothing(tmp_path, monkeypatch, capsys):
    source = cifar(tmp_path, "cifar10", "binary", SETS)
    whole = tmp_path / "whole"
    prepare("cifar10", source, whole, "--shard-mb", "0.002")
    written, real = [], work.write_whole

    def dies(path, data):
        real(path, data)
        written.append(path.name)
        if path.name == "train-00002.json":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(work, "write_whole", dies)
        with pytest.raises(KeyboardInterrupt):
            prepare("cifar10", source, tmp_path / "out", "--shard-mb", "0.002")
    begun = tmp_path / "out" / "cifar10" / "incomplete.3.0.2"
    (begun / "train-00003.array_record.part").write_bytes(b"half")
    with pytest.raises(UserError, match="not prepared to the end"):
        read(tmp_path / "out", "cifar10", "train", 10)
    kept = (begun / "train-00001.array_record").stat().st_mtime_ns
    capsys.readouterr()
    prepare("cifar10", source, tmp_path / "out", "--shard-mb", "0.002")
    assert "in 3 finished parts" in capsys.readouterr().err
    final = tmp_path / "out" / "cifar10" / "3.0.2"
    assert next(final.glob("*train*-00001-*")).stat().st_mtime_ns == kept
    files = json.loads((final / "index.json").read_text())["files"]
    assert files == json.loads((whole / "cifar10" / "3.0.2" / "index.json").read_text())["files"]
    assert {p.name for p in final.iterdir()} == {"index.json", "dataset_info.json", "features.json", *files}
    before = runs.snapshot(final)
    prepare("cifar10", source, tmp_path / "out", "--shard-mb", "0.002", "--verify")
    told = capsys.readouterr().out
    assert "all done, nothing to do" in told and "every file is as it was written" in told
    source.unlink()
    prepare("cifar10", source, tmp_path / "out")
    assert runs.snapshot(final) == before
    file = next(final.glob("*test*"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    prepare("cifar10", source, tmp_path / "out", "--verify", code=2)
    assert f"{file.name} is not what was written" in capsys.readouterr().err


def test_killed_while_it_is_finished(tmp_path, monkeypatch):
    """The index is there, the files have half their names."""
    source = cifar(tmp_path, "cifar10", "binary", SETS)
    with monkeypatch.context() as patch:
        patch.setattr(work.Work, "_complete", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare("cifar10", source, tmp_path / "out")
    begun = tmp_path / "out" / "cifar10" / "incomplete.3.0.2"
    (begun / "test-00000.array_record").rename(begun / "cifar10-test.array_record-00000-of-00001")
    prepare("cifar10", source, tmp_path / "out")
    same(read(tmp_path / "out", "cifar10", "test", 10), SETS["test"])


def test_what_is_missing_and_where_to_get_it(tmp_path, capsys):
    for name, words in {
        "cifar100": "get cifar-100-binary.tar.gz or -python.tar.gz from https://www.cs.toronto.edu",
        "kmnist": "has no train-images-idx3-ubyte.gz: put it there; kmnist is at https://github.com/rois-codh",
        "imagenet2012": "ImageNet needs an account: ILSVRC2012_img_train.tar",
        "wikipedia": "from https://dumps.wikimedia.org",
        "wikitext103": "Salesforce/wikitext",
        "fineweb_edu": "HuggingFaceFW/fineweb-edu",
        "eltec_eng": "git clone https://github.com/COST-ELTeC/ELTeC-eng",
    }.items():
        prepare(name, tmp_path, tmp_path / "out", code=2)
        assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    imagenet(tmp_path, "tars")
    (tmp_path / "ILSVRC2012_devkit_t12.tar.gz").unlink()
    prepare("imagenet2012", tmp_path, tmp_path / "out", code=2)
    assert "knows the classes of the validation images" in capsys.readouterr().err


@pytest.mark.parametrize(
    "asked",
    [*(["eltec_eng", *o] for o in (["--verify"], ["--jobs=2"], ["--shard-mb=1"])), ["ucf101", "--max-bad=1"]],
    ids=" ".join,
)
def test_options_that_would_do_nothing_are_refused(asked, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        prepare_data.main([*asked, str(tmp_path), "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2 and f"unrecognized arguments: {asked[1]}" in capsys.readouterr().err


def test_another_source_in_the_same_place(tmp_path, capsys):
    prepare("cifar10", cifar(tmp_path, "cifar10", "binary", SETS), tmp_path / "out")
    other = {"train": SETS["train"][1:], "test": SETS["test"]}
    prepare("cifar10", cifar(tmp_path, "cifar10", "pickle", other), tmp_path / "out", code=2)
    assert "was begun with source = " in capsys.readouterr().err
