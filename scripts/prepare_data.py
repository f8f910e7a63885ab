"""Make training data once, from what was downloaded: images as TFDS ArrayRecord files, text as token shards, folders
of frames by their lists.

    python scripts/prepare_data.py cifar100 cifar-100-binary.tar.gz --out data/tfds
    python scripts/prepare_data.py wikipedia enwiki-20231101-pages-articles-multistream.xml.bz2 \\
        --out data/tokens/wikipedia --vocab 16000
    python scripts/prepare_data.py eltec_eng ELTeC-eng/level1 --out data

There cifar100_vit_tiny, wikipedia_lm (whose vocabulary is 16,000) and length_extrapolation look for them. Nothing is
downloaded: where a file is missing, the message says where it is to be had. A killed command goes on where it was, and
one that is done says so. Members that can't be used are named and counted.
"""

import argparse
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for the workers too

from jojax.errors import UserError  # noqa: E402 — the repository's own package, installed or not
from scripts.prepare import eltec, imagenet, images, records, shards, texts, ucf101, wikipedia, work  # noqa: E402

HUB = "parquet (train-*.parquet, test-*.parquet of the hub)"
IMAGES = {
    "cifar10": ("3.0.2", f"the binary or python .tar.gz, its folder, or {HUB}", images.CIFAR10.prepare_from),
    "cifar100": ("3.0.2", f"the binary or python .tar.gz, its folder, or {HUB}", images.CIFAR100.prepare_from),
    "imagenet2012": (
        "5.1.0",
        "a folder with ILSVRC2012_img_train.tar, _img_val.tar and the devkit; or train/ and val/ of class folders; or "
        "Kaggle's ILSVRC/ and LOC_val_solution.csv; or parquet",
        imagenet.source,
    ),
    **{
        name: (version, f"a folder of the IDX files, or {HUB}", lambda root, name=name: images.mnist(name, root))
        for name, (version, _) in images.MNIST.items()
    },
}
WIKITEXT = "WikiText: the parquet files of Salesforce/wikitext from the hub, or wiki.{train,valid,test}.{raw,tokens}"
ROWS = {
    "openwebtext": "OpenWebText: the files of Skylion007/openwebtext from the hub",
    "fineweb_edu": "FineWeb-Edu: the parquet files of HuggingFaceFW/fineweb-edu from the hub, such as sample/10BT",
}
TEXTS = {
    "wikipedia": (
        "a dump (pages-articles .xml, .xml.bz2, multistream too), WikiExtractor's folder, parquet, or a TFDS folder",
        wikipedia.source,
    ),
    **{
        name: (
            "the folder of wiki.{train,valid,test}.{raw,tokens}, or of parquet",
            lambda root, name=name: texts.wikitext(name, root, WIKITEXT),
        )
        for name in ("wikitext2", "wikitext103")
    },
    **{
        name: (
            "a file or folder of .parquet, or of .jsonl (.gz, .xz, .zst)",
            lambda root, name=name, where=where: texts.rows(name, root, where),
        )
        for name, where in ROWS.items()
    },
}
FILES = {
    "eltec_eng": ("the folder level1 of ELTeC-eng; gives .jsonl.xz", eltec.prepare),
    "ucf101": ("a folder of ucfTrainTestlist/ and <class>/<video>/<frame>.jpg; gives links to these", ucf101.prepare),
}


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="name", required=True, metavar="DATASET")
    helps = {n: h for n, (_, h, _) in IMAGES.items()} | {n: h for n, (h, _) in TEXTS.items()}
    for name, told in (helps | {n: h for n, (h, _) in FILES.items()}).items():
        command = commands.add_parser(name, help=told)
        command.add_argument("source", type=pathlib.Path, help=told)
        out = "the folder of the files" if name == "eltec_eng" else "data.path"
        command.add_argument("--out", type=pathlib.Path, required=True, help=f"where the result goes: {out} of configs")
        if name != "ucf101":
            command.add_argument("--max-bad", type=float, default=0.001, help="share of bad members that fails (0.001)")
        if name not in FILES:
            command.add_argument("--verify", action="store_true", help="read the finished files, check their SHA-256")
            command.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
            command.add_argument("--shard-mb", type=float, default=256.0, help="size of a shard in MB (256)")
        if name == "ucf101":
            command.add_argument("--list", type=int, default=1, choices=(1, 2, 3), help="which official lists (1)")
        if name in TEXTS:
            command.add_argument(
                "--tokenizer",
                default="bpe",
                help="bpe (trained here), bytes, a tokenizer.json, or a folder of GPT-2's encoder.json and vocab.bpe",
            )
            command.add_argument("--vocab", type=int, default=32_000, help="ids of a trained bpe (32000)")
            command.add_argument("--sample-mb", type=float, default=200.0, help="text that the bpe is trained on (200)")
            command.add_argument("--sample-every", type=int, default=1, help="… taking every Nth document (1)")
            command.add_argument(
                "--valid", type=float, default=0.005, help="share of documents held out, where no split is given (.005)"
            )
    return parser.parse_args(argv)


def run(args):
    if args.name in FILES:
        for line in FILES[args.name][1](args.out, args.source, args):
            print(line)
        return
    if args.name in IMAGES:
        version, _, source = IMAGES[args.name]
        final, how = args.out / args.name / version, f"data.source=tfds data.name={args.name} data.path={args.out}"
    else:
        final, source, how = args.out, TEXTS[args.name][1], f"data.source=tokens data.path={args.out}"
    done = work.Work(final, {})
    if args.source.exists() or done.index() is None:  # what is done may outlive its source
        before = done.index() is not None
        if args.name in IMAGES:
            done = records.prepare(args.out, args.name, final.name, source(args.source), args)
        else:
            done = shards.prepare(args.out, source(args.source), args)
        print(f"{final}: " + ("all done, nothing to do" if before else "written"))
    else:
        print(f"{final}: all done, nothing to do ({args.source} is no longer there)")
    if args.verify:
        done.verify()
        print("every file is as it was written")
    summary(done.index())
    print(f"read it with {how}")


def summary(index):
    for split, count in index.get("examples", {}).items():
        print(f"{split}: {count:,} images")
    for split, counts in index.get("splits", {}).items():
        print(
            f"{split}: {counts['documents']:,} documents, {counts['tokens']:,} tokens, {counts['text_bytes']:,} bytes"
        )
    if "tokenizer" in index:
        print(f"tokenizer: {index['tokenizer']['vocab']:,} ids; valid: {index['valid_split']}")
    for name, file in list(index["files"].items())[:8]:
        print(f"{file['sha256']}  {name}")
    if len(index["files"]) > 8:
        print(f"and {len(index['files']) - 8} more files; all are in index.json")
    bad = sum(len(s["bad"]) for s in index["streams"].values())
    print(f"{bad} members left out" + (", named in index.json" if bad else ""))


def main(argv=None):
    try:
        run(parse(argv))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
