"""`python -m docs.site.moving_picture`: docs/reading.gif, the lab's first page in use, and stills. Needs Chromium."""

from __future__ import annotations

import io
import shutil
import tempfile
from pathlib import Path
from typing import Any

from avow.lab.export import export_lab

PICTURE = Path(__file__).parents[1] / "reading.gif"
_SIZE: Any = {"width": 1180, "height": 560}
_QUIET = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
# Milliseconds that a frame stays: after a step of the slider, where there is something to read, and between words.
_STEP, _READ, _WRITE = 450, 2200, 700
_COLOURS = 96
# Other pages, by the name of the picture.
STILLS = {
    "lab-head.png": "explorer.html?keys=1_0.3_0.2",
    "lab-breaks.png": "bench.html?method=sparse&kind=induction",
    "lab-claims.png": "claims.html?claim=copy-possible",
}
_STILL: Any = {"width": 1280, "height": 760}


def frames(tab: Any) -> list[tuple[bytes, int]]:
    """The page at work: the slider goes up, one head is chosen, the model writes on."""
    found: list[tuple[bytes, int]] = []

    def keep(milliseconds: int) -> None:
        tab.wait_for_timeout(150)
        found.append((tab.screenshot(), milliseconds))

    tab.wait_for_function("() => document.getElementById('sentence').textContent.includes('Nothing is left out')")
    tab.evaluate("document.getElementById('stories').scrollIntoView()")
    keep(_READ)
    tab.focus("#tolerance")
    for _ in range(5):
        tab.keyboard.press("ArrowRight")
        keep(_STEP)
    keep(_READ)
    tab.fill("#search", "layer 18 head 6")
    tab.press("#search", "Enter")
    tab.evaluate("document.getElementById('stories').scrollIntoView()")
    keep(_READ)
    tab.click("#play")
    for _ in range(5):
        tab.wait_for_timeout(800)
        keep(_WRITE)
    keep(_READ)
    return found


def stills(browser: Any, folder: str) -> None:
    """Write a picture of each of the other pages as it is with a server: without the note of a copy."""
    from PIL import Image

    tab = browser.new_page(viewport=_STILL, device_scale_factor=1)
    for name, address in STILLS.items():
        tab.goto(f"file://{folder}/lab/{address}")
        tab.wait_for_function("() => /^(kept|impossible|corrected)$/.test(document.getElementById('mark').textContent)")
        tab.evaluate("""() => {
          delete document.body.dataset.static;
          document.querySelectorAll(".notice, #controls > p").forEach(one => one.remove());
          document.querySelectorAll("input").forEach(one => one.disabled = false);
        }""")
        tab.wait_for_timeout(500)
        picture = Image.open(io.BytesIO(tab.screenshot())).convert("RGB")
        # All colours of lines count alike, however thin the lines are.
        drawn = picture.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        drawn.save(PICTURE.with_name(name), optimize=True)


def main() -> None:
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        export_lab(Path(folder) / "lab")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=[*_QUIET, "--disable-sync"])
        tab = browser.new_page(viewport=_SIZE)
        tab.goto(f"file://{folder}/lab/index.html")
        taken = frames(tab)
        stills(browser, folder)
        browser.close()
    width = 880
    small = (width, round(width * _SIZE["height"] / _SIZE["width"]))
    pictures = [Image.open(io.BytesIO(png)).convert("RGB").resize(small, Image.Resampling.LANCZOS) for png, _ in taken]
    # All frames share the colours of four of them, one above the other.
    some = pictures[:: max(1, len(pictures) // 4)]
    strip = Image.new("RGB", (small[0], small[1] * len(some)))
    for i, picture in enumerate(some):
        strip.paste(picture, (0, i * small[1]))
    palette = strip.quantize(_COLOURS)
    paletted = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
    durations = [milliseconds for _, milliseconds in taken]
    paletted[0].save(PICTURE, save_all=True, append_images=paletted[1:], duration=durations, loop=0, optimize=True)
    print(f"{PICTURE.name}: {len(taken)} frames, {PICTURE.stat().st_size >> 10} KiB")


if __name__ == "__main__":
    main()
