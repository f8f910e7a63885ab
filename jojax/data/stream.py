"""Batches as pure functions of (seed, step), on grain's index arithmetic: no shuffle buffer, no iterator
state.

The global stream of a seed: example n is source[p(n mod N) in epoch n div N], with a new permutation p in
each epoch, and is augmented by a generator that depends on the seed and n alone. Batch `step` is the rows
[step·B, step·B + B) of the stream, and each of several hosts computes its own contiguous part of them. So
a run resumes from its step alone, and the number of hosts may change between runs.

Repeated augmentation (arXiv 1901.09335), r times: batch `step` holds the examples [step·B/r, step·B/r + B/r) of
the stream r times over, one set of all after the other, each row augmented on its own. An epoch of steps sees a
part 1/r of the examples, r epochs all of them r times.
"""

import concurrent.futures
import os

import grain
import numpy as np

from jojax.errors import UserError

MOST = 32  # threads that make the rows of a batch; Python's lock keeps more of them waiting
NO_PLACE = ("segment", "document")  # -1 in padding rows, where every other key is 0


class Batches:
    """Iterator over batches, read ahead by threads, with random access beside it: batches[step] is the
    batch of a step.

    A batch is a dict of NumPy arrays whose first axis is this host's share of the batch. Memory:
    num_threads + 1 batches. The attribute `step` is the step of the batch that comes next.
    """

    def __init__(self, shares, start_step, num_threads):
        self._shares, dataset = shares, grain.MapDataset.source(shares)
        self._dataset = dataset
        options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=num_threads)
        self._iterator = iter(dataset.to_iter_dataset(options))
        self.seek(start_step)

    def __len__(self):
        return len(self._dataset)

    def __getitem__(self, step):
        return self._dataset[step]

    def __iter__(self):
        return self

    def __next__(self):
        batch = next(self._iterator)
        self.step += 1
        return batch

    def seek(self, step):
        """Makes the batch of `step` the next one."""
        self.step = step
        self._iterator.set_state({"next_index": step})

    def close(self):
        """Stops the threads; no batch can be read after it."""
        self._iterator.close()
        self._shares.close()


def train_batches(
    source,
    batch_size,
    seed,
    *,
    start_step=0,
    transform=None,
    process_index=0,
    process_count=1,
    num_threads=2,
    row_threads=None,
    repeat=1,
):
    """The endless training stream of a source.

    Args:
      source: len() and [i] -> example, a dict of arrays of fixed shapes after the transform.
      batch_size: examples of one step on all hosts together.
      seed: int ≥ 0; decides the order and, apart from it, the augmentation.
      start_step: the step to begin with.
      transform: (example, np.random.Generator) -> example, or None.
      process_index, process_count: this host and their number; the parts of hosts 0, 1, … joined are the
        batch that one host would compute, bit for bit.
      num_threads: batches prepared at a time; 0 prepares each when it is asked for.
      row_threads: rows of them made at a time; 0: a batch makes its own, one after the other. Default: that without a
        transform, whose rows cost next to nothing, or on two cores, which the batches keep busy; else the cores.
      repeat: times that each example stands in its batch.

    Returns:
      Batches.

    Raises:
      UserError: batch_size is not a multiple of process_count or repeat, or seed is negative.
    """
    share = _host_share(batch_size, process_count)
    if batch_size % repeat:
        raise UserError(f"batch_size is {batch_size}: make it a multiple of data.augment.repeat, {repeat}")
    if seed < 0:
        raise UserError(f"seed is {seed}: give an integer from 0 on")
    order_seed, augmentation_seed = (int(s) for s in np.random.SeedSequence(seed).generate_state(2))
    stream = grain.MapDataset.source(source).shuffle(seed=order_seed).repeat()
    if repeat > 1:
        stream = grain.MapDataset.source(_Repeated(stream, batch_size, repeat))
    if transform is not None:
        stream = stream.random_map(transform, seed=augmentation_seed)
    threads = _row_threads(transform) if row_threads is None else row_threads
    return Batches(_Shares(stream, share, process_index, process_count, threads), start_step, num_threads)


def eval_batches(source, batch_size, process_index=0, process_count=1, *, transform=None, num_threads=2):
    """Every example of a source once, in its order; len() of the result is the number of batches, equal
    on all hosts.

    The last batch is filled up with rows of weight 0 (segment and document -1, all else 0).

    Args:
      transform: (example) -> example, or None. Else as in train_batches.

    Raises:
      UserError: batch_size is not a multiple of process_count.
    """
    share = _host_share(batch_size, process_count)
    rows = _Padded(source, transform, -(-len(source) // batch_size) * batch_size)
    return Batches(_Shares(rows, share, process_index, process_count, _row_threads(transform)), 0, num_threads)


def _row_threads(transform):
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST) if transform and cores > 2 else 0


class _Repeated:
    """A stream in which every example stands `repeat` times in its batch."""

    def __init__(self, stream, batch_size, repeat):
        self._stream, self._size, self._distinct = stream, batch_size, batch_size // repeat

    def __len__(self):
        return len(self._stream)

    def __getitem__(self, index):
        step, row = divmod(index, self._size)
        return self._stream[step * self._distinct + row % self._distinct]


class _Padded:
    """A source, transformed, with blank rows after its end."""

    def __init__(self, source, transform, length):
        self._source, self._transform, self._length = source, transform, length

    def __len__(self):
        return self._length

    def __getitem__(self, index):
        if index >= len(self._source):
            return {key: np.full_like(value, -1 if key in NO_PLACE else 0) for key, value in self[0].items()}
        example = self._source[index]
        return self._transform(example) if self._transform else example


def _host_share(batch_size, process_count):
    if batch_size < 1 or batch_size % process_count:
        raise UserError(f"batch_size is {batch_size}: give a positive multiple of the number of hosts, {process_count}")
    return batch_size // process_count


class _Shares:
    """This host's part of every batch: rows step·B + index·share onward, made by so many threads at a time."""

    def __init__(self, rows, share, process_index, process_count, threads):
        self._rows, self._share, self._index, self._count = rows, share, process_index, process_count
        self._pool = concurrent.futures.ThreadPoolExecutor(threads) if threads else None

    def __len__(self):
        return len(self._rows) // (self._share * self._count)

    def __getitem__(self, step):
        start = (step * self._count + self._index) * self._share
        make = self._pool.map if self._pool else map
        rows = list(make(self._rows.__getitem__, range(start, start + self._share)))
        return {key: np.stack([row[key] for row in rows]) for key in rows[0]}

    def close(self):
        if self._pool:
            self._pool.shutdown(wait=False, cancel_futures=True)
