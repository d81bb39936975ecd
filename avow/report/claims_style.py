"""How the page of claims looks, and the little script that filters it."""

from __future__ import annotations

STYLE = """
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
h3 { font-size: 1rem; margin: 0; font-family: ui-monospace, monospace; font-weight: 600; }
h3 a { text-decoration: none; }
h4 { font-size: .8rem; margin: 1.1rem 0 .2rem; color: var(--soft); font-weight: 600; }
article > p { max-width: 50rem; }
.says { font-size: 1.06rem; margin: .45rem 0; }
li math, .facts math { font-size: 1rem; }
.instead { border-left: 3px solid var(--corrected); padding-left: 1rem; margin: .8rem 0; }
.instead h4 { margin-top: 0; color: var(--corrected); }
ul, ol { margin: .2rem 0; padding-left: 1.3rem; max-width: 52rem; }
summary { cursor: pointer; font-size: .92rem; margin-top: 1rem; }
ol.steps > li { margin: .45rem 0; }
.kind { font-size: .78rem; color: var(--soft); border: 1px solid var(--line); border-radius: .3rem; padding: 0 .35rem;
  margin-right: .2rem; white-space: nowrap; }
.facts { color: var(--soft); font-size: .85rem; overflow-x: auto; overflow-wrap: anywhere; }
.facts span { margin-right: 1rem; }
.broken { list-style: none; padding: 0; font-size: .92rem; }
.trouble { color: var(--refuted); }
.figure { height: 20rem; }
.caption { font-weight: 600; margin-top: 1rem; }
article td.wordy { white-space: normal; min-width: 14rem; }
article td, article th { text-align: left; }
footer { margin-top: 1rem; font-size: .85rem; color: var(--soft); }
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
