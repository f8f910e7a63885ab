"""batch = f(seed, step): the same batches in any order of asking, from any start, on any number of hosts."""

import os
import sys
import threading

import numpy as np
import pytest

from jojax.data import stream
from jojax.data.corpus import Corpus
from jojax.data.image import image_eval_transform, image_train_transform
from jojax.data.source import open_source
from jojax.data.text import ByteTokenizer
from jojax.data.windows import PackedRows, split_windows
from jojax.errors import UserError

CFG = {"source": "fashion_mnist", "image_size": 32, "crop": "pad4", "flip": True, "mean": 0.3, "std": 0.3}


class Numbers:
    """N examples that are their own index."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if not 0 <= index < self.count:
            raise IndexError(index)
        return {"id": np.int32(index), "weight": np.float32(1)}


def noisy(example, rng):
    return example | {"noise": rng.random(3).astype(np.float32)}


def ids(batches, steps):
    return np.concatenate([batches[step]["id"] for step in range(steps)])


def equal(a, b):
    assert a.keys() == b.keys()
    return all(np.array_equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def joined(parts):
    return {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}


@pytest.fixture(scope="module")
def images():
    return open_source(CFG, "train")


@pytest.mark.parametrize(("threads", "rows"), [(0, 0), (1, 0), (3, 0), (0, 2), (2, 5)])
def test_iteration_seek_and_random_access_agree(images, threads, rows):
    transform, threads = image_train_transform(CFG), dict(num_threads=threads, row_threads=rows)
    batches = stream.train_batches(images, 6, 1, transform=transform, start_step=2, **threads)
    alone = stream.train_batches(images, 6, 1, transform=transform, num_threads=0, row_threads=0)
    assert equal(batches[2], alone[2])
    assert batches.step == 2
    for step in (2, 3, 4):
        assert equal(next(batches), batches[step])
    assert batches.step == 5
    for step in (0, 1700, 2, 4):  # back, into another epoch, back again
        batches.seek(step)
        assert equal(next(batches), batches[step]) and batches.step == step + 1
    batches.close()


def test_a_new_stream_continues_where_an_old_one_stopped(images):
    def start(step):
        return stream.train_batches(images, 5, 3, transform=image_train_transform(CFG), start_step=step)

    old, new = start(0), start(4)
    for _ in range(4):
        next(old)
    for _ in range(3):
        assert equal(next(old), next(new))
    for batches in (old, new):
        batches.close()


def test_image_batches_keep_the_contract(images):
    batch = stream.train_batches(images, 7, 0, transform=image_train_transform(CFG))[3]
    assert {k: (v.dtype, v.shape) for k, v in batch.items()} == {
        "image": (np.float32, (7, 32, 32, 3)),
        "label": (np.int32, (7,)),
        "weight": (np.float32, (7,)),
    }
    assert (batch["weight"] == 1).all()


@pytest.mark.parametrize("count", [1, 2, 3, 10, 25])
def test_every_epoch_is_a_new_permutation(count):
    """Batches run over the borders of epochs, and small sets repeat within a batch."""
    batches = stream.train_batches(Numbers(count), 4, 7)
    stream_ids = ids(batches, 3 * count)[: 12 * count].reshape(12, count)
    assert all(sorted(epoch) == list(range(count)) for epoch in stream_ids.tolist())
    different = len({tuple(epoch) for epoch in stream_ids.tolist()})
    assert different >= {1: 1, 2: 2, 3: 4}.get(count, 12)


def test_order_is_not_a_rotation_nor_near_the_original():
    epochs = ids(stream.train_batches(Numbers(500), 50, 0), 20).reshape(2, 500)
    correlation = np.corrcoef([np.arange(500), *epochs])
    assert np.abs(correlation[np.triu_indices(3, 1)]).max() < 0.15
    assert (np.diff(epochs[0]) == 1).sum() < 10


def test_seeds_differ_in_order_and_in_augmentation():
    one, two = (stream.train_batches(Numbers(40), 8, seed, transform=noisy) for seed in (0, 1))
    a, b = (joined([s[i] for i in range(5)]) for s in (one, two))
    assert sorted(a["id"]) == sorted(b["id"]) == list(range(40))
    assert (a["id"] == b["id"]).mean() < 0.3
    assert not np.isin(a["noise"], b["noise"]).any()
    # no epoch of one seed is an epoch of the other: a permutation seeded with seed + epoch would repeat
    epochs = [set(map(tuple, ids(s, 50).reshape(10, 40).tolist())) for s in (one, two)]
    assert len(epochs[0]) == len(epochs[1]) == 10 and not epochs[0] & epochs[1]


def test_augmentation_differs_by_example_and_by_epoch():
    batches = stream.train_batches(Numbers(12), 12, 5, transform=noisy)
    noise = np.concatenate([batches[epoch]["noise"] for epoch in range(4)])
    assert len(np.unique(noise)) == noise.size
    assert 0.3 < noise.mean() < 0.7


@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_together_compute_the_one_batch(images, hosts):
    transform = image_train_transform(CFG)
    whole = stream.train_batches(images, 8, 2, transform=transform)
    parts = [
        stream.train_batches(images, 8, 2, transform=transform, process_index=h, process_count=hosts)
        for h in range(hosts)
    ]
    for step in (0, 1, 623, 626):  # step 625 begins the second epoch
        assert equal(joined([p[step] for p in parts]), whole[step])
    for part in parts:
        part.seek(624)
    assert equal(joined([next(p) for p in parts]), whole[624])
    for batches in [whole, *parts]:
        batches.close()


@pytest.mark.parametrize(("count", "batch", "hosts"), [(10, 4, 1), (10, 4, 2), (9, 8, 4), (8, 4, 2), (1, 6, 3)])
def test_evaluation_sees_every_example_once(count, batch, hosts):
    parts = [list(stream.eval_batches(Numbers(count), batch, h, hosts)) for h in range(hosts)]
    lengths = {len(stream.eval_batches(Numbers(count), batch, h, hosts)) for h in range(hosts)}
    assert {len(p) for p in parts} == lengths == {-(-count // batch)}
    whole = [joined(step) for step in zip(*parts, strict=True)]
    assert all(len(b["id"]) == batch for b in whole)
    every = joined(whole)
    assert every["id"][every["weight"] > 0].tolist() == list(range(count))
    assert not every["id"][count:].any() and not every["weight"][count:].any()


def test_evaluation_of_images_equals_the_transform_of_each(images):
    test, transform = open_source(CFG, "valid"), image_eval_transform(CFG)
    batches = list(stream.eval_batches(test, 300, transform=transform))
    assert len(batches) == 4 and joined(batches)["weight"].sum() == 1000
    for i in (0, 299, 300, 999):
        assert np.array_equal(batches[i // 300]["image"][i % 300], transform(test[i])["image"])
    assert batches[3]["image"].dtype == np.float32 and not batches[3]["image"][100:].any()


def test_text_rows_are_packed_and_padded():
    rng = np.random.default_rng(0)
    lengths = [20, 3, 31, 8]
    corpus = Corpus(rng.integers(0, 256, sum(lengths)).astype(np.int32), np.cumsum([0, *lengths]), ByteTokenizer())
    rows = PackedRows(corpus, 7)
    batch = stream.train_batches(rows, 5, 0)[1]
    assert {k: (v.dtype, v.shape) for k, v in batch.items()} == {
        k: (np.float32 if k == "weight" else np.int32, (5, 7)) for k in rows[0]
    }
    epoch = joined([stream.train_batches(rows, 3, 0)[s] for s in range(3)])
    assert len(rows) == 9 and epoch["weight"].sum() == sum(lengths) - len(lengths)
    scored = joined(list(stream.eval_batches(split_windows(corpus, 7), 4, num_threads=1)))
    assert scored["weight"].sum() == sum(lengths) - len(lengths)
    padding = scored["document"] == -1
    assert padding.sum() == -len(split_windows(corpus, 7)) % 4
    assert (scored["segment"][padding] == -1).all() and not scored["tokens"][padding].any()


def test_errors_come_from_the_threads_as_they_are():
    def broken(example, rng):
        if example["id"] == 3:
            raise UserError("image 3 is broken")
        return example

    batches = stream.train_batches(Numbers(6), 6, 0, transform=broken)
    with pytest.raises(UserError) as caught:
        next(batches)
    assert str(caught.value) == "image 3 is broken"
    batches.close()


def test_bad_batch_sizes_and_seeds():
    for make in (
        lambda: stream.train_batches(Numbers(9), 6, 0, process_count=4),
        lambda: stream.eval_batches(Numbers(9), 6, 0, 4),
        lambda: stream.eval_batches(Numbers(9), 0),
    ):
        with pytest.raises(UserError, match=r"batch_size is \d: give a positive multiple of the number of hosts"):
            make()
    with pytest.raises(UserError, match="seed is -1"):
        stream.train_batches(Numbers(9), 3, -1)


@pytest.mark.parametrize("cores", [1, 2, 3, 100])
def test_a_machine_of_many_cores_makes_rows_of_one_batch_at_a_time(monkeypatch, cores):
    """Those that a transform makes; no other thread waits for its turn there. The batches are the same."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores))
    wanted = 1 if cores <= 2 else min(cores, 32)
    for make in (stream.train_batches, stream.eval_batches):
        together = threading.Barrier(wanted, timeout=60)

        def meets(example, *_, together=together):
            together.wait()
            return example

        seed = (7,) if make is stream.train_batches else ()
        batches = make(Numbers(96), wanted, *seed, transform=meets, num_threads=1)
        plain = make(Numbers(96), wanted, *seed, num_threads=1)
        assert equal(batches[2], plain[2]) and not together.broken
        for _ in range(2):
            assert equal(next(batches), next(plain))
        together.abort()  # rows read ahead may have begun
        batches.close()


def test_a_row_that_fails_in_its_thread_is_told(images):
    def fails(example, rng):
        raise UserError("copy the files again")

    batches = stream.train_batches(images, 4, 0, transform=fails, row_threads=3)
    with pytest.raises(UserError, match="copy the files again"):
        next(batches)
    batches.close()


def test_no_tensorflow():
    assert "tensorflow" not in sys.modules
