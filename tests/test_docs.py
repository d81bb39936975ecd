"""The documents: a site is made of them offline, every link leads somewhere, and what they name exists."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import json
import posixpath
import re
import sys
import types
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer
from markdown_it import MarkdownIt

import avow
from avow.cli import app
from avow.core.docstring import parse
from avow.theory.claims import catalogue
from docs.site import api, search, verdicts
from docs.site.__main__ import main
from docs.site.build import Site, build
from docs.site.page import Page
from tests.test_readme import PAGES, ROOT

# The parts of every method's page, in this order; others may stand between.
PARTS = ["Idea", "Formula", "Cost", "Certificate", "When it fails"]


@pytest.fixture(scope="module")
def site() -> Site:
    return build(ROOT)


class Links(HTMLParser):
    """What a page links to, the names it can be linked at, and whatever else it would load."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.names: set[str] = set()
        self.loaded: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if "id" in found:
            self.names.add(found["id"])
        if tag == "a":
            self.targets.append(found.get("href", ""))
        elif tag == "form":
            self.targets.append(found.get("action", ""))
        elif "src" in found or "href" in found:
            self.loaded.append(found.get("src", "") or found["href"])


def dead(files: dict[str, str]) -> list[str]:
    """Links of a site that lead nowhere, and what its pages would fetch, read from the HTML itself."""
    read = {address: Links(html) for address, html in files.items()}
    found = []
    for address, links in read.items():
        for target in links.targets:
            if target.startswith("https://"):
                continue
            path, _, name = target.partition("#")
            there = posixpath.normpath(posixpath.join(posixpath.dirname(address), path)) if path else address
            if not target or there not in read or (name and name not in read[there].names):
                found.append(f"{address}: {target!r}")
        found += [
            f"{address}: loads {source!r}"
            for source in links.loaded
            if not source.startswith(("data:image/", "data:,"))
        ]
    return found


def test_the_site_is_made_without_a_fault(site: Site) -> None:
    assert site.faults == []


def test_every_page_and_every_public_name_is_in_it(site: Site) -> None:
    pages = {str(path.relative_to(ROOT / "docs")).replace(".md", ".html") for path in (ROOT / "docs").glob("**/*.md")}
    assert pages - {"README.html"} | {"index.html", "contributing.html"} <= set(site.files)
    assert undocumented(site.files, api.MODULES) == []
    assert "Attention, and the certificate of the error it made." in site.files["api/avow.html"]


def undocumented(files: dict[str, str], modules: tuple[str, ...]) -> list[str]:
    """Names that a module lists or imports as themselves, read from its file, which its page has no heading for."""
    found = []
    for module in modules:
        text = Path(importlib.import_module(module).__file__ or "").read_text()
        names = {*re.findall(r"^from [\w.]+ import (\w+) as \1$", text, re.MULTILINE)}
        names |= {*getattr(importlib.import_module(module), "__all__", ())}
        submodules = {name.rpartition(".")[2] for name in modules if name.startswith(f"{module}.")}
        anchors = Links(files[f"api/{module}.html"]).names
        found += [f"{module}.{x}" for x in sorted(names - submodules) if x[0] != "_" and x.lower() not in anchors]
    return found


def test_a_public_name_that_the_reference_leaves_out_is_caught(site: Site) -> None:
    page = site.files["api/avow.nn.html"]
    spoilt = site.files | {"api/avow.nn.html": page.replace('id="keyvaluecache"', 'id="cache-of-keys"')}
    assert spoilt != site.files
    assert undocumented(spoilt, api.MODULES) == ["avow.nn.KeyValueCache"]


def test_what_two_modules_offer_is_described_once(site: Site) -> None:
    for name in ("Certificate", "Cost", "Method", "Sizes"):
        there = site.files["api/avow.core.html"].split(f'id="{name.lower()}"')[1].split("<h2")[0]
        assert f'<a href="avow.html#{name.lower()}"><code>avow.{name}</code></a> describes it.' in there
        assert "<h3" not in there and "<table>" not in there


def test_rows_of_an_earlier_function_are_not_repeated() -> None:
    page, _ = api.module_page("avow")
    audit = page.split("\n## audit\n")[1].split("\n## ")[0]
    assert re.search(r"^\| `q`, `k`, `v`, .*`mask`.* \| \| \| as \[attend\]\(#attend\) \|$", audit, re.MULTILINE)
    assert "\n| `q` |" not in audit and "\n| `out` | `Tensor` |" in audit and "\n| `coverage` |" in audit
    assert "`ShapeError`" in audit.split("**Raises**")[1].split(": as [attend](#attend)")[0]


def test_constants_and_attributes_that_are_set_later_are_described() -> None:
    page, _ = api.module_page("avow")
    assert "| `unattributed` | | | answers of other threads" in page.split("\n## Record\n")[1]
    page, _ = api.module_page("avow.core")
    assert "\n## SOFTMAX\n\nA constant: `'softmax attention'`." in page
    assert "One of `deterministic`, `statistical`, `sampled`, `none`." in page


def test_schemas_are_plain_text() -> None:
    for kind in (avow.Certificate, avow.Plan, avow.nn.DecodePlan):
        assert ":math:" not in json.dumps(kind.json_schema())


def test_every_link_leads_somewhere_and_nothing_is_fetched(site: Site) -> None:
    assert dead(site.files) == []
    assert sum(len(Links(html).targets) for html in site.files.values()) > 500


@pytest.mark.parametrize(
    "body",
    [
        "<a href='b.html'>",
        "<a href='#nowhere'>",
        "<a href='c/d.html#nowhere'>",
        "<a href='../a.html'>",
        "<a>",
        "<form action='search.html'>",
        "<img src='https://example.org/a.png'>",
        "<script src='a.js'></script>",
    ],
)
def test_a_link_that_leads_nowhere_is_caught(body: str) -> None:
    other = "<p id='here'><a href='../a.html'>"
    assert dead({"a.html": "<a href='c/d.html#here'>", "c/d.html": other}) == []
    assert len(dead({"a.html": body, "c/d.html": other})) == 1


def test_formulas_are_drawn_and_code_is_in_colours(site: Site) -> None:
    for name in avow.all_methods():
        page = site.files[f"methods/{name}.html"]
        assert page.count("<math") >= 3 and 'class="latex"' not in page
        assert "$" not in re.sub(r"<(script|style)>.*?</\1>", "", page, flags=re.DOTALL)
        assert '<span class="kn">import</span>' in page
    assert "<math" in site.files["api/avow.optim.html"], "docstrings have formulas, too"


def written(folder: Path, **changes: str | None) -> Path:
    """A small repository with two pages, and some of them otherwise."""
    pages: dict[str, str | None] = {
        "docs/README.md": "# Start\n\n## Contents\n\n### First\n\n- [Two](two.md): the other\n",
        "docs/two.md": "# Two\n\n## A part\n\nSee [the start](README.md) and [above](#a-part), $x^2$.\n",
    }
    for name, text in (pages | {f"docs/{name}.md": text for name, text in changes.items()}).items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder


def test_a_small_site_is_made(tmp_path: Path) -> None:
    made = build(written(tmp_path), modules=())
    assert made.faults == [] and dead(made.files) == []
    assert sorted(made.files) == ["index.html", "search.html", "two.html"]


def test_every_page_links_to_the_repository(site: Site, tmp_path: Path) -> None:
    source = '<a href="https://github.com/avow-attention/avow">source</a>'
    assert [address for address, html in site.files.items() if source not in html] == []
    assert "<footer>" not in build(written(tmp_path), modules=()).files["index.html"], "it has no address"


def test_the_search_holds_every_part_of_every_page(site: Site) -> None:
    found = re.search(
        r'<script type="application/json" id="index">(.*?)</script>', site.files["search.html"], re.DOTALL
    )
    assert found is not None
    index = {address: parts for _, address, parts in json.loads(found[1])}
    assert {*index} == {*site.files} - {"search.html"}
    (sinks,) = (text for anchor, _, text in index["decoding.html"] if anchor == "several-queries-windows-sinks")
    assert "One extra logit per query head." in sinks
    places = Links(site.files["api/avow.nn.html"]).names
    assert {anchor for anchor, _, _ in index["api/avow.nn.html"]} <= places
    assert "keyvaluecacheattend" in {anchor.replace("-", "") for anchor, _, _ in index["api/avow.nn.html"]}


def test_text_cannot_end_the_element_that_holds_it() -> None:
    page = Page("a", "a.html", "", "A", "<h1 id='a'>A</h1><p>&lt;/script&gt; and more</p>")
    assert "\\u003c/script> and more" in search.body([page])


def test_the_page_of_verdicts_is_that_of_the_catalogue() -> None:
    known = catalogue()
    assert verdicts.PAGE.read_text() == verdicts.page(known.values()), "python -m docs.site.verdicts writes it"
    rows = re.findall(r"^\| `([\w-]+)` \| .* \| (\w+) \| (.*) \|$", verdicts.PAGE.read_text(), re.MULTILINE)
    assert {id: verdict for id, verdict, _ in rows} == {id: claim.expected for id, claim in known.items()}
    assert all(bool(instead.strip()) == (verdict in ("refuted", "corrected")) for _, verdict, instead in rows)


def test_a_verdict_that_changed_changes_the_page() -> None:
    claim = dataclasses.replace(catalogue()["copy-gap"], expected="supported")
    assert "| supported |" in verdicts.page([claim]) and "1 claims: 1 supported." in verdicts.page([claim])


def test_a_page_that_the_contents_call_by_another_name_is_named(tmp_path: Path) -> None:
    assert build(written(tmp_path, two="# Three\n"), modules=()).faults == [
        "docs/README.md: calls docs/two.md 'Two', and its title is 'Three'"
    ]


@pytest.mark.parametrize(
    ("page", "fault"),
    [
        ("# Two\n\n[no page](three.md)", "'three.md', which is no page"),
        ("# Two\n\n[no page](../pyproject.toml)", "which is no page"),
        ("# Two\n\n[no part](README.md#nothing)", "'index.html#nothing', where no heading"),
        ("# Two\n\n[not secure](http://example.org)", "'http://example.org' is no address"),
        ("# Two\n\n[no place](https://example)", "is no address"),
        (r"# Two" + "\n\n" + r"$\nosuchcommand{x}$", "cannot be read"),
        ("# Two\n\n![a picture](none.png)", "is not a PNG"),
        ("# Two\n\n![](none.png)", "has no words"),
        ("# Two\n\n```ruby\n1\n```\n", "'ruby'"),
        ("# Two\n\n# Three", "second title"),
        ("Two", "has no title"),
    ],
)
def test_a_fault_of_a_page_is_named(tmp_path: Path, page: str, fault: str) -> None:
    found = build(written(tmp_path, two=page), modules=()).faults
    assert any(words.startswith("docs/two.md: ") and fault in words for words in found)


def test_a_page_that_nobody_lists_is_named_and_so_is_one_that_does_not_exist(tmp_path: Path) -> None:
    assert build(written(tmp_path, three="# Three"), modules=()).faults == [
        "docs/README.md: does not list docs/three.md"
    ]
    (tmp_path / "docs/three.md").unlink()
    (tmp_path / "docs/two.md").unlink()
    assert "docs/README.md: lists docs/two.md, which does not exist" in build(tmp_path, modules=()).faults


def test_a_public_name_without_a_docstring_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = types.ModuleType("planted", "A module.")
    exec("def told():\n    'Told.'\ndef untold(): ...\ndef _own(): ...\n", planted.__dict__)
    monkeypatch.setitem(sys.modules, "planted", planted)
    assert build(written(tmp_path), modules=("planted",)).faults == ["planted.untold: has no docstring"]


PLANTED = '''
import dataclasses
import enum

def good(a, *, b=1, **more):
    """Said.

    Args:
        a: one.
        b: two.
        **more: the rest.
    """

def silent(a, b):
    """Said.

    Args:
        a: one.
    """

def stale(a):
    """Said.

    Args:
        a: one.
        gone: what was here once.
    """

class Made:
    """Made.

    Args:
        size: how large.
    """

    def __init__(self, size): ...

    def used(self, times):
        """Use it."""

    @property
    def shown(self):
        """Something."""

@dataclasses.dataclass
class Held:
    """Held.

    Attributes:
        x: one.
    """

    x: int
    y: int = dataclasses.field(default=1, metadata={"help": "two."})
    z: int = 2

class Wrong(ValueError):
    """An error."""

class Mood(enum.Enum):
    """A choice."""

    CALM = 1
'''


def test_a_parameter_that_nothing_is_said_of_is_named_and_so_is_one_that_does_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = types.ModuleType("planted", "A module.")
    monkeypatch.setitem(sys.modules, "planted", planted)
    exec(PLANTED, planted.__dict__)
    assert build(written(tmp_path), modules=("planted",)).faults == [
        "planted.silent: does not say what b is",
        "planted.stale: speaks of gone, which is not a parameter",
        "planted.Made.used: does not say what times is",
        "planted.Held: does not say what z is",
    ]


def test_the_page_of_a_function_has_a_row_for_each_parameter() -> None:
    page, faults = api.module_page("avow")
    assert faults == []
    assert "| `tol` | `float \\| None` | `None` | the largest error of a row" in page
    assert "**Returns** The answer and its certificate" in page and "- `ShapeError`: sizes do not fit" in page
    for name, parameter in inspect.signature(avow.attend).parameters.items():
        assert f"\n| `{name}` | `{parameter.annotation.replace('|', chr(92) + '|')}` |" in page


def test_names_that_differ_in_capitals_alone_have_places_of_their_own(site: Site) -> None:
    places = api.anchors("avow")
    assert (places["plan"], places["Plan"]) == ("plan", "plan-1")
    assert {*places.values()} <= Links(site.files["api/avow.html"]).names


def unexampled(modules: tuple[str, ...]) -> list[str]:
    """Functions, and classes that people make, without an example in their docstrings."""
    found = []
    for name in modules:
        for item, thing in api.public(importlib.import_module(name)).items():
            made = inspect.isclass(thing) and bool(parse(api.described(thing)).args)
            if (made or inspect.isfunction(thing)) and ">>> " not in api.described(thing):
                found.append(f"{name}.{item}")
    return found


def test_what_people_call_has_an_example() -> None:
    # These need a trained model, a file of one's own, or minutes.
    none = {f"avow.integrations.transformers.{name}" for name in ("decoding_speed", "read_plan", "register", "verify")}
    modules = ("avow", "avow.nn", "avow.optim", "avow.distributed", "avow.integrations.transformers")
    assert {*unexampled(modules)} == none | {"avow.apply", "avow.look"}
    assert "avow.errors.value_text" in unexampled(("avow.errors",))


def test_docstrings_become_pages() -> None:
    text = r"""Half of it, :math:`x/2` [claim half].

    .. math:: \frac{x}
              {2}

    Said below.

    >>> half(4)
    2
    """
    page = api.markdown_of(text)
    assert "$x/2$ (claim `half`)" in page and "$$\n\\frac{x} {2}\n$$" in page and "\nSaid below." in page
    assert "```python\n>>> half(4)\n2\n```" in page


def test_tables_in_docstrings_become_lists_and_drawings_stay_as_they_are() -> None:
    text = """Said.
    Parts:
        one     the first
        a.b     the :math:`x` second
    A tree.

        root
        └── leaf   a leaf
    """
    page = api.markdown_of(text)
    assert "\nParts:\n\n- `one`: the first\n- `a.b`: the $x$ second\n" in page
    assert "```text\nroot\n└── leaf   a leaf\n```" in page
    for name in api.MODULES:
        opening = api.markdown_of(parse(importlib.import_module(name).__doc__).text)
        assert not re.search(r"^ {4}", re.sub(r"```.*?```", "", opening, flags=re.DOTALL), re.MULTILINE), name


def test_the_command_writes_a_site_and_replaces_an_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = build(written(tmp_path), modules=())
    monkeypatch.setattr("docs.site.__main__.build", lambda root: small)
    out = tmp_path / "out" / "site"
    assert main(["--out", str(out)]) == 0
    (out / "old.html").write_text("old")
    assert main(["--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["index.html", "search.html", "two.html"]
    (out / "index.html").unlink()
    assert main(["--out", str(out)]) == 1 and (out / "two.html").exists(), "it removes nothing but sites"
    assert main(["--out", str(out / "two.html")]) == 1 and (out / "two.html").is_file()


def test_where_anything_is_wrong_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("docs.site.__main__.build", lambda root: Site({"index.html": ""}, ["a.md: is wrong"]))
    assert main(["--out", str(tmp_path / "site")]) == 1
    assert "a.md: is wrong\n1 fault" in capsys.readouterr().err and not (tmp_path / "site").exists()


def headings(page: Path) -> list[str]:
    return re.findall(r"^## (.*)$", page.read_text(), re.MULTILINE)


def lacking(pages: dict[str, list[str]], methods: list[str]) -> list[str]:
    """Methods without a page, pages without a method, and pages without one of their parts."""
    found = [f"{name}: has no page" for name in methods if name not in pages]
    found += [f"{name}: is no method" for name in pages if name not in methods]
    return found + [f"{name}: its parts are not {PARTS}" for name, own in pages.items() if _parts(own) != PARTS]


def _parts(own: list[str]) -> list[str]:
    return [part for part in own if part in PARTS]


def test_every_method_has_its_page() -> None:
    pages = {path.stem: headings(path) for path in (ROOT / "docs" / "methods").glob("*.md")}
    assert lacking(pages, list(avow.all_methods())) == []
    assert lacking({"exact": PARTS, "old": PARTS}, ["exact", "new"]) == ["new: has no page", "old: is no method"]
    assert len(lacking({"exact": PARTS[:-1]}, ["exact"])) == 1


def spoken(text: str) -> list[str]:
    """What stands in a page's lines as code."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    inside = [token for block in tokens for token in block.children or []]
    return [token.content for token in inside if token.type == "code_inline"]


def unknown(words: str) -> str:
    """What is wrong with a name, path or command that a page mentions; nothing where it exists."""
    if "flattened" in words:
        return ""  # the method that CONTRIBUTING makes up, and whose test runs it
    if re.fullmatch(r"avow(\.\w+)+(\(.*\))?", words):
        return "" if _resolves(words.partition("(")[0]) else f"{words}: does not resolve"
    if re.fullmatch(r"(avow|tests|docs|benchmarks)/[\w./-]*", words):
        return "" if (ROOT / words).exists() else f"{words}: does not exist"
    if match := re.match(r"make ([\w-]+)$", words):
        known = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return "" if match[1] in known else f"{words}: is no target"
    if match := re.match(r"python -m ([\w.]+)", words):
        return "" if importlib.util.find_spec(match[1]) else f"{words}: is no module"
    return _misspoken(words.split()) if words.startswith("avow ") else ""


def _resolves(dotted: str) -> bool:
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            thing: object = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for name in parts[cut:]:
            if not hasattr(thing, name):
                return False
            thing = getattr(thing, name)
        return True
    return False


def _misspoken(words: list[str]) -> str:
    command = typer.main.get_command(app)
    for word in words[1:]:
        if isinstance(command, typer.core.TyperGroup) and not word.startswith("-"):
            if word not in command.commands:
                return f"{' '.join(words)}: {word} is no command"
            command = command.commands[word]
    known = {"--help"} | {option for parameter in command.params for option in parameter.opts}
    strange = [word for word in words if word.startswith("--") and word not in known]
    return f"{' '.join(words)}: has no {', '.join(strange)}" if strange else ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    assert [problem for words in spoken(page.read_text()) if (problem := unknown(words))] == []


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("avow.attend(q, k, v)", "avow.atend(q, k, v)"),
        ("avow.nn.KeyValueCache.append", "avow.nn.KeyValueCache.add"),
        ("tests/conftest.py", "tests/no_such.py"),
        ("avow/methods/", "avow/no_such/"),
        ("make check", "make chekc"),
        ("python -m benchmarks.run --quick", "python -m benchmarks.no_such"),
        ("avow train pretrain --help", "avow train pretend"),
        ("avow compare --length 5", "avow compare --lenght 5"),
        ("avow claims", "avow claim"),
    ],
)
def test_a_name_that_is_none_is_caught(good: str, bad: str) -> None:
    assert unknown(good) == "" and bad.split()[0] in unknown(bad)


def test_code_in_lines_is_found() -> None:
    assert spoken("a `b` c\n\n| `d` | e |\n|---|---|\n| f | `g` |\n\n```python\nh\n```\n") == ["b", "d", "g"]
