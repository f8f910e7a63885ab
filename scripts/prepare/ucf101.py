"""UCF-101's folders of frames, linked into train/ and test/ as one of its official lists says."""

from jojax.data.folder import visible
from jojax.errors import UserError

WHERE = (
    "UCF-101: UCF101.rar and UCF101TrainTestSplits-RecognitionTask.zip from https://www.crcv.ucf.edu/data/UCF101.php; "
    'beside ucfTrainTestlist/, for v in */*.avi; do mkdir "${v%.avi}"; ffmpeg -i "$v" -q:v 2 "${v%.avi}/%05d.jpg"; done'
)


def prepare(out, root, args):
    """out/<split>/<class>/<video>, links to root/<class>/<video>. -> lines to print"""
    lists = {split: root / "ucfTrainTestlist" / f"{split}list{args.list:02}.txt" for split in ("train", "test")}
    if gone := [file for file in lists.values() if not file.is_file()]:
        raise UserError(f"{gone[0]} is missing. {WHERE}")
    names = {
        split: [line.split()[0].removesuffix(".avi") for line in file.read_text().splitlines() if line.strip()]
        for split, file in lists.items()
    }
    if gone := [name for split in names.values() for name in split if not (root / name).is_dir()]:
        raise UserError(f"{root / gone[0]} is no folder of frames, and {len(gone) - 1:,} more of the lists. {WHERE}")
    for split, listed in names.items():
        classes = visible(out / split) if (out / split).is_dir() else []
        if other := sorted({f"{c.name}/{v.name}" for c in classes for v in visible(c)} - set(listed)):
            raise UserError(f"{out / split} has {other[0]}, which {lists[split].name} has not: choose another --out")
    for split, listed in names.items():
        for name in listed:
            link = out / split / name
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_dir():
                link.symlink_to((root / name).resolve())
        yield f"{split}: {len(listed):,} videos of {len({name.split('/')[0] for name in listed})} classes"
    yield f"read it with configs/comrope_ucf101.py and data.path={out}"
