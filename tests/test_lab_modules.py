"""Modules become one script that does the same, and what is not understood is refused."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from avow.lab.modules import NotBundled, bundle
from avow.lab.page import PACKAGE, all_pages
from avow.lab.rendering import static_files

FILES = {
    "a.js": 'import {twice, ONE as one} from "./b.js";\nimport "./c.js";\nlet at = 5;\nconsole.log(twice(at) - one);\n',
    "b.js": "export const ONE = 1;\nconst at = 2;\nexport function twice(x) {\n  return at * x;\n}\n",
    "c.js": 'import {\n  ONE,\n} from "./b.js";\nconsole.log("</script>".length + ONE);\n',
    "d.js": 'import {ONE} from "./b.js";\nconsole.log(ONE);\n',
}


def test_a_module_stands_once_before_those_that_import_it() -> None:
    script = bundle(FILES, ["a.js", "d.js"])
    assert [script.index(f"module_{name}_js = (") for name in "bcad"] == sorted(
        script.index(f"module_{name}_js = (") for name in "abcd"
    )
    assert script.count("module_b_js = (") == 1 and "import" not in script and "export" not in script
    assert bundle(FILES, ["a.js", "d.js"]) == script


def test_nothing_in_a_module_ends_the_element_around_it() -> None:
    script = bundle({"a.js": 'const s = "</script><SCRIPT></Script><!-- -->";\n'}, ["a.js"])
    assert "</script" not in script.lower() and "<!--" not in script


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_script_does_what_its_modules_do() -> None:
    ran = subprocess.run(
        ["node", "--input-type=module", "-"],
        input=bundle(FILES, ["a.js", "d.js"]),
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.split() == ["10", "9", "1"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('import all from "./b.js";\n', "import all"),
        ('import * as all from "./b.js";\n', "import \\* as all"),
        ('import {a} from "https://elsewhere";\n', "elsewhere"),
        ("export default 3;\n", "export default"),
        ("export let x = 3;\n", "export let"),
        ("export {x};\n", "export \\{x\\}"),
        ('const x = await import("./b.js");\n', "import\\("),
        ('import {a} from "./x.js";\n', "imports itself"),
    ],
)
def test_what_is_not_understood_is_refused(source: str, words: str) -> None:
    with pytest.raises(NotBundled, match=words):
        bundle({**FILES, "x.js": source}, ["x.js"])


def test_the_scripts_of_every_page_can_be_one() -> None:
    for name in all_pages(PACKAGE):
        assert f"module_{name}_js" in bundle(static_files(), ["share.js", f"{name}.js"])
