"""The examples of a page with their answers: what a copy of the lab without Python behind it shows of that page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from avow.lab.page import Answer, Inputs, Page
from avow.lab.scenes import SCENES


def examples(page: Page) -> list[dict[str, Any]]:
    """The page's examples and the scenes that claims lead to: the inputs of each, its preview and its verdict."""
    scenes = [_typed(page.inputs, scene.query) for scene in SCENES.values() if scene.page == page.name]
    wanted: list[tuple[Inputs, Mapping[str, Any]]] = []
    for given in (*page.presets.values(), *scenes):
        inputs = page.inputs.of(dict(given))
        if all(inputs != other for other, _ in wanted):
            wanted.append((inputs, given))
    return [{"inputs": dict(given), **_answers(page, inputs)} for inputs, given in wanted]


def _answers(page: Page, inputs: Inputs) -> dict[str, Answer]:
    no_file: tuple[dict[str, Any], ...] = ({},) if page.takes_files else ()
    found = {"preview": page.preview(inputs, *no_file)}
    if page.verdict is not None:
        found["verdict"] = page.verdict(inputs, *no_file)
    return found


def _typed(inputs: type[Inputs], query: str) -> dict[str, Any]:
    """The inputs in an address."""
    kinds = {one.name: one.type for one in inputs.declared()}
    return {name: kinds[name](word) for name, word in parse_qsl(query)}
