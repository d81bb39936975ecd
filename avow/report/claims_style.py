"""How the page of claims looks, and the little script that filters it."""

from __future__ import annotations

from importlib import resources

# How one claim looks, here and in the lab.
ARTICLE = (resources.files("avow.report") / "article.css").read_text(encoding="utf-8")

STYLE = (
    ARTICLE
    + """
html { scroll-padding-top: 1rem; }
a { color: inherit; text-decoration-color: var(--line); text-underline-offset: .2em; }
a:hover { text-decoration-color: currentColor; }
.filters { display: flex; flex-wrap: wrap; gap: .4rem; align-items: center; margin: 1.2rem 0 .7rem; }
.filters button, .filters select { font: inherit; font-size: .85rem; padding: .25rem .8rem; border-radius: 1rem;
  border: 1px solid var(--line); background: var(--page); color: var(--ink); cursor: pointer; max-width: 100%; }
.filters button[aria-pressed=true] { background: var(--ink); border-color: var(--ink); color: var(--page); }
.overview td { text-align: left; white-space: normal; vertical-align: baseline; }
.overview th { text-align: left; }
.overview td:first-child, .overview td.verdict { white-space: nowrap; }
article { border: 1px solid var(--line); border-radius: .7rem; padding: 1rem 1.2rem 1.1rem; margin: 1rem 0; }
article:target { border-color: var(--soft); }
article header { display: flex; flex-wrap: wrap; gap: .2rem .7rem; align-items: center; }
h3 a { text-decoration: none; }
.figure { height: 20rem; }
@media (max-width: 40rem) {
  .wide { display: none; }
  article { padding: .8rem .8rem 1rem; }
  .overview thead { display: none; }
  .overview tr { display: grid; grid-template-columns: 1fr auto; border-top: 1px solid var(--line); padding: .4rem 0; }
  .overview tr[hidden] { display: none; }
  .overview td { border: 0; padding: .1rem .75rem; }
  .overview td:nth-child(3) { grid-column: 1 / 3; }
}
[hidden] { display: none; }
@media print { .filters { display: none; } article { break-inside: avoid; } }
"""
)

FILTER = """
const topic = document.getElementById("topic"), verdicts = [...document.querySelectorAll("button[data-verdict]")];
const kept = document.getElementById("kept");
function filter() {
  const wanted = verdicts.filter(b => b.ariaPressed === "true").map(b => b.dataset.verdict);
  let count = 0;
  for (const item of document.querySelectorAll("[data-topic]")) {
    const seen = (!topic.value || item.dataset.topic === topic.value)
      && (!wanted.length || wanted.includes(item.dataset.verdict));
    item.hidden = !seen;
    count += seen && item.tagName === "ARTICLE";
  }
  for (const section of document.querySelectorAll("section"))
    section.hidden = !section.querySelector("article:not([hidden])");
  kept.textContent = count + (count === 1 ? " claim" : " claims");
}
const unfold = () => document.querySelectorAll("details").forEach(details => details.open = true);
document.getElementById("unfold").addEventListener("click", unfold);
topic.addEventListener("change", filter);
verdicts.forEach(b => b.addEventListener("click", () => {
  b.ariaPressed = b.ariaPressed === "true" ? "false" : "true";
  filter();
}));
filter();
"""
