"""ELTeC-eng: the level1 TEI files of the public repository to the jsonl.xz files that configs/ read."""

import hashlib
import json
import lzma

from jojax.errors import UserError
from scripts.prepare.texts import tei_text
from scripts.prepare.work import Bad, Tally, write_whole

WHERE = "ELTeC-eng: git clone https://github.com/COST-ELTeC/ELTeC-eng, and give its folder level1"
VALID = [
    "ENG19020_Nesbit",
    "ENG19060_Nesbit",
    "ENG19070_Machen",
    "ENG19071_Silberrad",
    "ENG19080_Chesterton",
    "ENG19090_Wells",
    "ENG19091_Ward",
    "ENG19100_Forster",
    "ENG19111_Hornung",
    "ENG19120_Wells",
]
# of the uncompressed files behind the published runs, made from another state of the repository
KNOWN = {
    "train": "5d835c9fa8e52f3bebeb8f67978059fe676cac08baec6438dc5f1dfd99b2760c",
    "valid": "8372e4cc24cc986a1f1d3510b388998ca766d92674610e2bdfda8bbb6eef507d",
}


def prepare(out, root, args):
    """eltec_eng_{train,valid}.jsonl.xz: the ten novels of VALID, and all that are older. -> lines to print"""
    files = {p.stem: p for p in sorted(root.glob("*.xml"))} if root.is_dir() else {}
    if gone := [title for title in VALID if title not in files]:
        raise UserError(f"{root} has no {gone[0]}.xml. {WHERE}")
    splits = {"train": [t for t in files if t < VALID[0]], "valid": VALID}
    if other := [t for t in files if t not in splits["train"] and t not in VALID]:
        yield f"left out, since neither older than {VALID[0]} nor in the valid split: {', '.join(other)}"
    out.mkdir(parents=True, exist_ok=True)
    for split, titles in splits.items():
        tally = Tally(split, [], args.max_bad)
        rows = [json.dumps(row, ensure_ascii=False) for _, row in tally.count(_novels(titles, files))]
        tally.close()
        data = ("\n".join(rows) + "\n").encode()
        path, digest = out / f"eltec_eng_{split}.jsonl.xz", hashlib.sha256(data).hexdigest()
        told = "written"
        if path.exists() and hashlib.sha256(lzma.decompress(path.read_bytes())).hexdigest() == digest:
            told = "all done, nothing to do"
        else:
            write_whole(path, lzma.compress(data))
        same = "the same as" if digest == KNOWN[split] else "not the bytes of"
        yield f"{path}: {len(rows)} novels, sha256 of the text {digest}, {same} those behind the published runs; {told}"


def _novels(titles, files):
    for title in titles:
        try:
            yield title, {"title": title, "text": tei_text(files[title])}
        except UserError as error:
            yield title, Bad(title, str(error))
