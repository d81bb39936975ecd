"""The whole site: every page that the start page lists, in that order, then the public names, and a search."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

from avow.report.page import document
from docs.site import api, search
from docs.site.page import Known, Page, relative, rendered
from docs.site.style import STYLE

START = "docs/README.md"
# The addresses of the project that every page ends with, as pyproject.toml calls them.
_OUTSIDE = ("Source", "Issues", "Changelog")


@dataclass(frozen=True)
class Site:
    """Files by their address in the site, and whatever is wrong with them."""

    files: dict[str, str]
    faults: list[str]


@dataclass(frozen=True)
class Section:
    """A heading of the contents and the addresses below it."""

    title: str
    addresses: list[str]


def build(root: Path, modules: tuple[str, ...] = api.MODULES) -> Site:
    """The site of a repository; nothing is written."""
    faults: list[str] = []
    sources = sorted(str(path.relative_to(root)) for path in (root / "docs").glob("**/*.md"))
    listed = contents((root / START).read_text())
    for source in [source for _, group in listed for source in group]:
        if not (root / source).is_file():
            faults.append(f"{START}: lists {source}, which does not exist")
        elif source not in sources:
            sources.append(source)
    pages = [Page(source, _address(source), (root / source).read_text()) for source in sources]
    home = api.homes(modules)
    for name in modules:
        text, found = api.module_page(name, home)
        pages.append(Page(name, f"api/{name}.html", text))
        faults += found
    known = Known(root, {page.source: page.address for page in pages}, _names(modules))
    for page in pages:
        rendered(page, known)
        faults += page.faults
    faults += _broken_links(pages)
    sections = [Section(title, [_address(source) for source in group]) for title, group in listed]
    shown = {address for section in sections for address in section.addresses} | {_address(START)}
    faults += [f"{START}: does not list {page.source}" for page in pages[: len(sources)] if page.address not in shown]
    sections.append(Section("Reference", [f"api/{name}.html" for name in modules]))
    faults += _other_names((root / START).read_text(), pages)
    by_address, urls = {page.address: page for page in pages}, project_urls(root)
    files = {page.address: _whole(page, sections, by_address, urls) for page in pages}
    finder = Page("search", search.ADDRESS, "", "Search", search.body(pages))
    return Site(files | {search.ADDRESS: _whole(finder, sections, by_address, urls)}, faults)


def project_urls(root: Path) -> dict[str, str]:
    """Where the project is on the network, by name, if the repository says so."""
    file = root / "pyproject.toml"
    known: Mapping[str, str] = tomllib.loads(file.read_text())["project"]["urls"] if file.is_file() else {}
    return {name: known[name] for name in _OUTSIDE if name in known}


def contents(text: str) -> list[tuple[str, list[str]]]:
    """What the start page lists: under each heading after the first rule, the sources its items begin with."""
    found: list[tuple[str, list[str]]] = []
    for line in text.partition("\n## Contents\n")[2].splitlines():
        if heading := re.match(r"### (.*)", line):
            found.append((heading[1], []))
        elif (item := re.match(r"- \[[^]]*\]\(([^)#]*)\)", line)) and found:
            found[-1][1].append(str(Path("docs", item[1])).replace("docs/../", ""))
    return found


def _address(source: str) -> str:
    """docs/README.md is the index; docs/a/b.md is a/b.html; a page of the root keeps its name."""
    if source == START:
        return "index.html"
    return re.sub(r"\.md$", ".html", source.removeprefix("docs/").replace("CONTRIBUTING", "contributing"))


def _names(modules: tuple[str, ...]) -> dict[str, str]:
    """The address of each public name, spelled from its module."""
    found = {}
    for module in modules:
        found[module] = f"api/{module}.html"
        for name, anchor in api.anchors(module).items():
            found[f"{module}.{name}"] = f"api/{module}.html#{anchor}"
    return found


def _broken_links(pages: list[Page]) -> list[str]:
    anchors = {page.address: page.anchors for page in pages}
    found = []
    for page in pages:
        for link in page.links:
            address, _, anchor = link.partition("#")
            if anchor and anchor not in anchors[address]:
                found.append(f"{page.source}: links to {link!r}, where no heading has that name")
    return found


def _other_names(text: str, pages: list[Page]) -> list[str]:
    """Items of the contents that call a page something else than its title."""
    titles = {page.source: page.title for page in pages}
    found = []
    for words, target in re.findall(r"^- \[([^]]*)\]\(([^)#]*)\)", text.partition("\n## Contents\n")[2], re.MULTILINE):
        source = str(Path("docs", target)).replace("docs/../", "")
        if source in titles and titles[source] != words:
            found.append(f"{START}: calls {source} {words!r}, and its title is {titles[source]!r}")
    return found


def _whole(page: Page, sections: list[Section], pages: dict[str, Page], urls: Mapping[str, str]) -> str:
    title = "avow" if page.source == START else f"{page.title} · avow"
    box = "" if page.address == search.ADDRESS else search.form(page.address)
    outside = " · ".join(f'<a href="{escape(url)}">{escape(name.lower())}</a>' for name, url in urls.items())
    footer = f"<footer>{outside}</footer>\n" if outside else ""
    body = f"""<a class="skip" href="#text">to the text</a>
<div class="site">
<header><a href="{relative("index.html", page.address)}"><b>avow</b></a>
<a class="down" href="#contents">contents</a>{box}</header>
<main id="text">
{page.body}{_beside(page, sections, pages)}{footer}</main>
<nav id="contents" aria-label="contents">{_menu(page, sections, pages)}</nav>
</div>"""
    return document(title, body, STYLE)


def _menu(page: Page, sections: list[Section], pages: dict[str, Page]) -> str:
    html = ""
    for section in sections:
        items = ""
        for address in section.addresses:
            here = ' aria-current="page"' if address == page.address else ""
            title = escape(pages[address].title if address in pages else address).replace(".", ".<wbr>")
            items += f'<li><a href="{relative(address, page.address)}"{here}>{title}</a></li>'
        html += f"<h2>{escape(section.title)}</h2><ul>{items}</ul>\n"
    return html


def _beside(page: Page, sections: list[Section], pages: dict[str, Page]) -> str:
    """Links to the pages before and after this one."""
    order = ["index.html", *(address for section in sections for address in section.addresses)]
    order = [address for address in order if address in pages]
    if page.address not in order:
        return ""
    place = order.index(page.address)
    html = ""
    if place > 0:
        before = order[place - 1]
        html += f'<a rel="prev" href="{relative(before, page.address)}">← {escape(pages[before].title)}</a>'
    if place + 1 < len(order):
        after = order[place + 1]
        html += f'<a rel="next" href="{relative(after, page.address)}">{escape(pages[after].title)} →</a>'
    return f'<div class="beside">{html}</div>\n'
