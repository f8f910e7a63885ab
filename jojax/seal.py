"""A list of the files below a folder, sizes and CRCs, to tell later if they are still what was written."""

import json
import zlib
from pathlib import Path

LIST = "checksums.json"


def seal(folder: Path) -> None:
    """Write the list of the files in the folder's subfolders into the folder.

    Those beside the list are left out: orbax stamps them with the time of its commit, which comes after.
    """
    files = sorted(path for path in folder.rglob("*/*") if path.is_file())
    listed = {str(path.relative_to(folder)): (path.stat().st_size, _crc(path)) for path in files}
    (folder / LIST).write_text(json.dumps(listed))


def sealed(folder: Path) -> bool:
    """Is there a list?"""
    return (folder / LIST).exists()


def damage(folder: Path) -> str:
    """What is wrong with the files, in words; '' = they are as listed, or there is no list."""
    if not sealed(folder):
        return ""
    try:
        listed = json.loads((folder / LIST).read_text())
    except ValueError:
        return f"{LIST} is not readable"
    for name, (size, crc) in listed.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if _crc(path) != crc:
            return f"{name} has changed since it was written"
    return ""


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            crc = zlib.crc32(block, crc)
    return crc
