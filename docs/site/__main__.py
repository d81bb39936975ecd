"""`python -m docs.site`: the whole site in one folder, or every fault that keeps it from being made."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from docs.site.build import build

ROOT = Path(__file__).parents[2]


def main(arguments: list[str] | None = None) -> int:
    """Write the site; where anything is wrong with it, say what, write nothing and return 1."""
    parser = argparse.ArgumentParser(prog="python -m docs.site", description="The documents as a static site.")
    parser.add_argument("--out", type=Path, default=Path("out/site"), help="where the site goes [out/site]")
    out: Path = parser.parse_args(arguments).out
    site = build(ROOT)
    for fault in site.faults:
        print(fault, file=sys.stderr)
    if site.faults:
        count = "1 fault" if len(site.faults) == 1 else f"{len(site.faults)} faults"
        print(f"{count}; nothing was written", file=sys.stderr)
        return 1
    if out.exists() and not out.is_dir():
        print(f"--out={out} is no folder; name another place", file=sys.stderr)
        return 1
    if out.exists() and not (out / "index.html").exists() and any(out.iterdir()):
        print(f"--out={out} holds something else than a site; name another folder", file=sys.stderr)
        return 1
    part = out.with_name(f"{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    for address, text in site.files.items():
        (part / address).parent.mkdir(parents=True, exist_ok=True)
        (part / address).write_text(text)
    shutil.rmtree(out, ignore_errors=True)
    part.rename(out)
    print(f"wrote {len(site.files)} pages: {out / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
