"""A section of text and tables, as Markdown and as part of one self-contained HTML page."""

import base64
import html
import re
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


class Link(NamedTuple):
    """A cell that leads to another section."""

    text: str
    name: str

    @property
    def target(self):
        return urllib.parse.quote(self.name, safe="=,")


@dataclass
class Section:
    """name: the stem of its files. blocks: a heading (starts with #), a paragraph, or rows of cells, the first the
    head. csv: rows. plots: {stem of a PNG: function(path) that draws it}."""

    name: str
    title: str
    blocks: list[str | list[list[Any]]]
    csv: list[list[Any]]
    plots: dict[str, Any] = field(default_factory=dict)


def markdown(section):
    """## title, then every block after an empty line."""
    shown = (block if isinstance(block, str) else table(block) for block in section.blocks)
    return "\n\n".join([f"## {section.title}", *shown]) + "\n"


def table(rows):
    """Markdown of rows of cells, the first the head."""

    def cell(c):
        return f"[{c.text}]({c.target}.md)" if isinstance(c, Link) else c

    head, *body = rows
    return "\n".join(f"| {' | '.join(map(cell, row))} |" for row in [head, ["---"] * len(head), *body])


STYLE = """
body{font:16px/1.5 system-ui,sans-serif;color:#1a1a1a;background:#fff;max-width:76rem;margin:0 auto;padding:1rem}
h1,h2,h3{line-height:1.2}h2{border-top:1px solid #ccc;padding-top:1rem;margin-top:2.5rem;overflow-wrap:anywhere}
.wide{overflow-x:auto;margin:.7rem 0}table{border-collapse:collapse;font-size:.85rem}
th,td{border-bottom:1px solid #ddd;padding:.2rem .6rem;text-align:left;vertical-align:top;white-space:nowrap}
td:first-child,td.long{white-space:normal;min-width:11rem}th{background:#f2f2f2}
summary{cursor:pointer;font-weight:600;padding:.25rem 0}img{max-width:100%;height:auto}
nav li{overflow-wrap:anywhere}a{color:#0b57a4}code{font-size:.9em;overflow-wrap:anywhere}
"""
LONG = 40  # characters from which on a cell wraps


def inline(text):
    """Escaped; `code` and [text](url) as such."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
    return re.sub(r"\[([^\]]+)\]\((https?://[^)]+)\)", r'<a href="\2">\1</a>', text)


def linked(link):
    return f'<a href="#{link.target}">{html.escape(link.text)}</a>'


def rows_html(rows):
    def cell(c, tag):
        if isinstance(c, Link):
            return f"<{tag}>{linked(c)}</{tag}>"
        return f"<{tag}{' class=long' if len(c) > LONG else ''}>{inline(c)}</{tag}>"

    lines = ["".join(cell(c, "td" if k else "th") for c in row) for k, row in enumerate(rows)]
    return "\n".join(["<div class=wide><table>", *(f"<tr>{line}</tr>" for line in lines), "</table></div>"])


def section_html(section, folder):
    """Blocks under a heading fold away."""
    out, folded = [f'<section id="{html.escape(section.name)}"><h2>{html.escape(section.title)}</h2>'], False
    for block in section.blocks:
        if isinstance(block, str) and block.startswith("#"):
            out += ["</details>"] * folded
            out.append(f"<details><summary>{inline(block.lstrip('# '))}</summary>")
            folded = True
        else:
            out.append(f"<p>{inline(block)}</p>" if isinstance(block, str) else rows_html(block))
    out += ["</details>"] * folded
    out += [image(folder / f"{name}.png") for name in section.plots]
    return "\n".join([*out, "</section>"])


def image(path: Path):
    """The committed file itself; nothing where it is not there."""
    if not path.exists():
        return ""
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<p><img alt="{html.escape(path.stem)}" src="data:image/png;base64,{data}"></p>'


def page(sections, plots: Path):
    """All sections and all plots of a folder on one page without requests."""
    known = {name for section in sections for name in section.plots}
    others = [image(p) for p in sorted(plots.glob("*.png")) if p.stem not in known]
    links = [f"<li>{linked(Link(s.title, s.name))}</li>" for s in sections]
    body = [section_html(section, plots) for section in sections]
    if others:
        body.append("\n".join(["<section><h2>Other figures</h2>", *others, "</section>"]))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>jojax: results</title><style>{STYLE}</style></head>\n<body><h1>jojax: results</h1>\n"
        "<p>Made from the records of runs and the list of published figures alone. Small runs and the papers' tables "
        "never share a table; ± is half of a 95 % Student-t interval over seeds.</p>\n"
        f"<nav><ul>{''.join(links)}</ul></nav>\n{chr(10).join(body)}\n</body></html>\n"
    )
