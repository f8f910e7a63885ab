"""A folder built in numbered parts: it may be killed at any moment, goes on, and bears its name once whole."""

import hashlib
import itertools
import json
import multiprocessing
import os
import pathlib
import sys
import time
from collections import deque
from typing import NamedTuple

from jojax.errors import UserError

INDEX = "index.json"  # in a finished folder: what it was made from, counts, checksums


class Bad(NamedTuple):
    """A member of a source that can't be used."""

    name: str
    why: str


def write_whole(path, data):
    """Bytes or text under another name, renamed when all is on the disk."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def checksum(path):
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def fingerprint(files):
    """A hash of names and sizes: enough to tell that a source is no longer the one that was begun with."""
    listed = "\n".join(f"{path.name} {path.stat().st_size}" for path in files)
    return hashlib.sha256(listed.encode()).hexdigest()[:16]


class Work:
    """Makes the folder `final` as incomplete.NAME beside it.

    A part is some files and its record, a json that is written last: a part without one is made again. A record has
    seen (members of the source read), bad (name and reason of each that could not be used), files (name -> size and
    sha256), last (the stream ended) and what the writer adds. `plan`: what the folder is made from and how; work
    begun with another plan is not gone on with.

    Raises:
      UserError: the folder, or its unfinished part, is of another plan; too large a share of the members is bad.
    """

    def __init__(self, final, plan, max_bad=0.001):
        self.final, self.plan, self.max_bad = pathlib.Path(final), plan, max_bad
        self.folder = self.final.with_name(f"incomplete.{self.final.name}")

    def index(self):
        """The index of the finished folder, or None."""
        return _read(self.final / INDEX)

    def begin(self):
        """Makes the unfinished folder, or takes up the one that is there. -> is there nothing left to do?"""
        if done := self.index():
            self._same(done["plan"], self.final)
            return True
        if self.final.exists() and any(self.final.iterdir()):
            raise UserError(f"{self.final} is there already and was not made here: choose another --out or remove it")
        self.folder.mkdir(parents=True, exist_ok=True)
        if (done := _read(self.folder / INDEX)) is not None:
            self._same(done["plan"], self.folder)
            self._complete()
            return True
        begun = _read(self.folder / "plan.json")
        if begun is None:
            write_whole(self.folder / "plan.json", json.dumps(self.plan))
        else:
            self._same(begun, self.folder)
        for part in self.folder.glob("*.part"):
            part.unlink()
        return False

    def _same(self, old, place):
        new = json.loads(json.dumps(self.plan))
        for key in [*new, *old]:
            if old.get(key) != new.get(key):
                raise UserError(
                    f"{place} was begun with {key} = {old.get(key)!r}, not {new.get(key)!r}: choose another --out or "
                    "remove it"
                )

    def records(self, stream):
        """Those of the parts that are whole, from 0 on. A part whose file is gone or cut ends them."""
        found = []
        while record := _read(self.folder / f"{stream}-{len(found):05d}.json"):
            for name, file in record["files"].items():
                path = self.folder / name
                if not path.is_file() or path.stat().st_size != file["bytes"]:
                    return found
            found.append(record)
        return found

    def stream(self, stream, members, process, write):
        """All parts of a stream of members, finished ones kept. -> their records.

        members: iterator over (name, payload) or Bad, the same each time. process(members) -> iterator over
        (member, result or Bad). write(name of the part, iterator) -> (files, what to add to the record); it takes
        what one part holds.
        """
        done = self.records(stream)
        if done and done[-1]["last"]:
            return done
        tally = Tally(stream, done, self.max_bad)
        results = process(itertools.islice(members, tally.seen, None))
        while not (done and done[-1]["last"]):
            name = f"{stream}-{len(done):05d}"
            counted = tally.count(results)
            files, more = write(name, counted)
            for file in files:
                (self.folder / f"{file}.part").replace(self.folder / file)
            record = tally.record() | more | {"files": {f: checksum(self.folder / f) for f in files}}
            write_whole(self.folder / f"{name}.json", json.dumps(record))
            done.append(record)
        tally.close()
        return done

    def finish(self, records, index, names=lambda name: name, last=lambda folder: None):
        """The index, the files under their final names, last(folder), then the folder under its name."""
        streams = {
            stream: {"seen": sum(r["seen"] for r in rows), "bad": [b for r in rows for b in r["bad"]]}
            for stream, rows in records.items()
        }
        renames = {name: names(name) for rows in records.values() for r in rows for name in r["files"]}
        files = {renames[name]: file for rows in records.values() for r in rows for name, file in r["files"].items()}
        last(self.folder)
        write_whole(self.folder / "renames.json", json.dumps(renames))
        whole = {"plan": self.plan, **index, "streams": streams, "files": files}
        write_whole(self.folder / INDEX, json.dumps(whole, indent=1))
        self._complete()

    def _complete(self):
        """What follows once the index stands in the unfinished folder; may be done again from any point."""
        for old, new in (_read(self.folder / "renames.json") or {}).items():
            if (self.folder / old).exists():
                (self.folder / old).replace(self.folder / new)
        for stream in (_read(self.folder / INDEX) or {})["streams"]:
            for record in self.folder.glob(f"{stream}-*.json"):
                record.unlink()
        for name in ("plan.json", "renames.json"):
            (self.folder / name).unlink(missing_ok=True)
        if self.final.exists():
            self.final.rmdir()
        self.folder.replace(self.final)

    def verify(self):
        """Reads every file of the finished folder. UserError naming the first that is not as it was written."""
        for name, file in (self.index() or {"files": {}})["files"].items():
            path = self.final / name
            if not path.is_file() or checksum(path) != file:
                raise UserError(f"{path} is not what was written: remove {self.final} and prepare it again")


class Tally:
    """Counts members, tells of bad ones by name and of the progress, stops where too many are bad."""

    def __init__(self, stream, done, max_bad):
        self.stream, self.max_bad = stream, max_bad
        self.seen, self.bad = sum(r["seen"] for r in done), sum(len(r["bad"]) for r in done)
        self._start, self._told, self._first = time.monotonic(), time.monotonic(), self.seen
        self._ended, self._before, self._bad = False, self.seen, []
        if self.seen:
            print(f"{stream}: goes on after {self.seen:,} members in {len(done)} finished parts", file=sys.stderr)

    def count(self, results):
        """Yields (member, result), Bad ones left out."""
        self._ended, self._before, self._bad = True, self.seen, []
        for member, result in results:
            self.seen += 1
            if isinstance(result, Bad):
                self.bad += 1
                self._bad.append(result)
                print(f"{self.stream}: {result.name} is left out: {result.why}", file=sys.stderr)
                if self.bad > 100:
                    self._check()
            else:
                self._ended = False
                yield member, result
                self._ended = True  # unless the writer stops here: then this line does not run
            self._tell()

    def record(self):
        """Of the part since `count` was called."""
        return {"seen": self.seen - self._before, "bad": self._bad, "last": self._ended}

    def close(self):
        print(f"{self.stream}: {self.seen:,} members, {self.bad} left out", file=sys.stderr)
        self._check()

    def _check(self):
        if self.bad > self.max_bad * self.seen:
            raise UserError(
                f"{self.bad} of {self.seen:,} members of {self.stream} can't be used (named above), more than "
                f"--max-bad={self.max_bad:g} allows: mend the source, or raise it and start again to go on from here"
            )

    def _tell(self):
        now = time.monotonic()
        if now - self._told > (1 if sys.stderr.isatty() else 30):
            self._told, rate = now, (self.seen - self._first) / (now - self._start)
            end = "\r" if sys.stderr.isatty() else "\n"
            print(f"{self.stream}: {self.seen:,} members, {rate:,.0f}/s", end=end, file=sys.stderr, flush=True)


def ordered(function, members, jobs, setup, args):
    """(member, result) in the order of the members; Bad members are their own result.

    function(list of members) -> list of results runs in `jobs` processes after setup(*args) there; at most 3 · jobs
    lists of about a million bytes are under way. jobs = 1: here.
    """
    if jobs == 1:
        setup(*args)
        for chunk in _chunks(members):
            yield from _merge(chunk, function(_good(chunk)))
        return
    with multiprocessing.get_context("spawn").Pool(jobs, setup, args) as pool:
        under_way = deque()
        for chunk in _chunks(members):
            under_way.append((chunk, pool.apply_async(function, (_good(chunk),))))
            if len(under_way) >= 3 * jobs:
                first, result = under_way.popleft()
                yield from _merge(first, result.get())
        for chunk, result in under_way:
            yield from _merge(chunk, result.get())


def _good(chunk):
    return [member for member in chunk if not isinstance(member, Bad)]


def _merge(chunk, results):
    remaining = iter(results)
    return [(member, member if isinstance(member, Bad) else next(remaining)) for member in chunk]


def _chunks(members, most=256, size=1 << 20):
    chunk, held = [], 0
    for member in members:
        chunk.append(member)
        held += 0 if isinstance(member, Bad) else _size(member[1])
        if len(chunk) >= most or held >= size:
            yield chunk
            chunk, held = [], 0
    if chunk:
        yield chunk


def _size(payload):
    """Of a text, or of the image of an example."""
    return len(payload["image"] if isinstance(payload, dict) else payload)


def _read(path):
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): remove {path.parent} and start again") from error
