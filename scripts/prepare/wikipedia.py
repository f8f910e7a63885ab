"""Wikipedia: dumps (plain and multistream .bz2), what WikiExtractor wrote, parquet, a prepared TFDS set."""

import html
import re
import xml.etree.ElementTree as ET

from jojax.errors import UserError
from scripts.prepare.files import files_of, need, opened
from scripts.prepare.texts import TextSource, json_row, rows, tfds_rows
from scripts.prepare.work import Bad, fingerprint

WHERE = (
    "Wikipedia: XXwiki-DATE-pages-articles.xml.bz2 or -multistream.xml.bz2 from https://dumps.wikimedia.org, or the "
    "parquet files of wikimedia/wikipedia from the hub"
)
INVISIBLE = ("ref", "table", "math", "gallery", "timeline", "imagemap", "score", "syntaxhighlight", "source")
MEDIA = ("file", "image", "category", "media")


def source(root):
    """The TextSource of whichever of the formats lies at a path. UserError where none does."""
    if not root.exists():
        raise UserError(f"{root} does not exist. {WHERE}")
    files = files_of(root)
    if any(p.name == "dataset_info.json" for p in files):
        return tfds_rows("wikipedia", root, WHERE)
    wanted = [p for p in files if re.fullmatch(r"wiki_\d+(\.bz2)?", p.name)]
    if wanted:
        return _source(wanted, lambda: extracted(wanted))
    wanted = [p for p in files if p.name.endswith((".xml", ".xml.bz2")) or (".xml" in p.name and p.suffix == ".bz2")]
    if wanted:
        need("mwparserfromhell", "turning wiki markup into text")  # now, not after hours
        return _source(wanted, lambda: dump(wanted), "wiki")
    return rows("wikipedia", root, WHERE)


def _source(files, members, convert=""):
    return TextSource({"dataset": "wikipedia", "source": fingerprint(files)}, {"all": members}, convert)


def dump(files):
    """(title, markup) of every page of namespace 0 that is no redirect; one page is in memory at a time."""
    for path in files:
        with opened(path) as stream:
            try:
                yield from _pages(stream)
            except ET.ParseError as error:
                raise UserError(f"{path} ends early or is no dump ({error}): get that file again") from error


def _pages(stream):
    events = ET.iterparse(stream, ("start", "end"))
    _, root = next(events)
    for event, element in events:
        if event == "end" and _tag(element) == "page":
            fields = {_tag(child): child for child in element.iter()}
            redirect = any(_tag(child) == "redirect" for child in element)
            if not redirect and fields["ns"].text == "0":
                yield fields["title"].text, fields["text"].text or ""
            root.clear()


def _tag(element):
    """Without the namespace, whose version varies."""
    return element.tag.rpartition("}")[2]


def plain(markup):
    """Wiki markup to text, without templates, tables, references, files and categories."""
    import mwparserfromhell as mw

    nodes = mw.nodes

    def text(code):
        return "".join(map(piece, code.nodes)) if code is not None else ""

    def piece(node):
        if isinstance(node, nodes.Text):
            return str(node.value)
        if isinstance(node, nodes.Wikilink):
            return "" if _media(str(node.title)) else text(node.text if node.text is not None else node.title)
        if isinstance(node, nodes.Tag):
            name = str(node.tag).strip().lower()
            return "\n" if name == "br" else "" if name in INVISIBLE else text(node.contents)
        if isinstance(node, nodes.Heading):
            return text(node.title).strip()
        if isinstance(node, nodes.ExternalLink):
            return text(node.title) if node.title is not None or node.brackets else text(node.url)
        if isinstance(node, nodes.HTMLEntity):
            return node.normalize()
        return ""  # templates, their arguments, comments

    out = text(mw.parse(markup, skip_style_tags=False))
    out = re.sub(r"<ref\b[^>]*/>|<ref\b[^>]*>.*?</ref>|'{2,}", "", out, flags=re.DOTALL)  # unbalanced: not parsed
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", out)).strip()


def _media(title):
    """A file, category or the like, not an article or, with the colon before it, a link to one of those."""
    return title.strip().lower().partition(":")[0] in MEDIA


def extracted(files):
    """WikiExtractor's output: <doc …> … </doc>, or a JSON object a line."""
    for path in files:
        with opened(path) as stream:
            title, lines = None, []
            for number, line in enumerate(stream, 1):
                place = f"{path.parent.name}/{path.name}:{number}"
                if title is None and line.startswith(b"{"):
                    yield json_row(line, place)
                elif title is None and line.startswith(b"<doc "):
                    found = re.search(rb'title="(.*?)">', line)
                    title, lines = html.unescape(found[1].decode(errors="replace")) if found else place, []
                elif title is not None and line.rstrip() == b"</doc>":
                    yield _document(title, b"".join(lines), place)
                    title = None
                elif title is not None:
                    lines.append(line)
                elif line.strip():
                    yield Bad(place, "it is neither <doc …> nor a JSON object")
            if title is not None:
                yield Bad(f"{path.parent.name}/{path.name}, {title}", "the file ends inside this document")


def _document(title, body, place):
    """The first line of the body is the title again; both forms of the output then hold the same text."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        return Bad(place, f"it is no UTF-8 ({error})")
    return title, text.removeprefix(title).strip("\n")
