"""What the site adds to the look of the reports: a column of contents, and words of some length."""

from __future__ import annotations

STYLE = """
a { color: inherit; text-decoration-color: var(--soft); text-underline-offset: .2em; }
a:hover { text-decoration-color: currentColor; }
:focus-visible { outline: 2px solid #3a86d8; outline-offset: 2px; }
pre { overflow-x: auto; background: var(--card); border-radius: .5rem; padding: .7rem .9rem; }
pre code { font-size: inherit; overflow-wrap: normal; }
ul, ol { margin: .2rem 0; padding-left: 1.3rem; }
td math { font-size: 1rem; }
body { max-width: 76rem; padding-top: 0; }
html { scroll-padding-top: 1rem; }
.skip { position: absolute; left: -99rem; } .skip:focus { left: 1rem; top: .5rem; background: var(--page); }
.site { display: grid; grid-template-columns: 14rem minmax(0, 1fr); gap: 0 3rem;
  grid-template-areas: "head text" "menu text"; grid-template-rows: auto 1fr; }
header { grid-area: head; padding: 1.5rem 0 0; font-size: 1.2rem; } header a { text-decoration: none; }
header .down { display: none; }
main { grid-area: text; padding-top: 1rem; }
nav { grid-area: menu; font-size: .9rem; align-self: start; position: sticky; top: 0; max-height: 100vh;
  overflow-y: auto; padding-bottom: 2rem; }
nav h2 { font-size: .78rem; color: var(--soft); font-weight: 600; margin: 1.2rem 0 .2rem; }
nav ul { list-style: none; padding: 0; margin: 0; } nav li { padding: .1rem 0; overflow-wrap: anywhere; }
nav a { text-decoration: none; } nav a:hover { text-decoration: underline; }
nav a[aria-current] { font-weight: 650; }
main h1 { margin: .6rem 0 1rem; }
main h2 { margin: 2.4rem 0 .6rem; }
main h3 { margin: 1.8rem 0 .4rem; font-size: 1rem; }
main p, main li { max-width: 46rem; } main p:has(img) { max-width: none; }
main p { margin: .7rem 0; } main li { margin: .25rem 0; }
main pre { margin: .9rem 0; font-size: .8rem; }
main pre + pre.text { margin-top: -.4rem; background: none; border-left: 3px solid var(--line); border-radius: 0; }
main .scroll { margin: .9rem 0; }
main th, main td { text-align: left; white-space: normal; vertical-align: baseline; }
main td:first-child:not(:last-child) { min-width: 6rem; }
main th[style*=right], main td[style*=right] { white-space: nowrap; }
main td code { overflow-wrap: break-word; } :not(pre) > code span { white-space: nowrap; }
main img { max-width: 100%; height: auto; border-radius: .5rem; margin: .6rem 0; }
main img[src^="data:image/png"] { background: #fff; }
main .formula { margin: .9rem 0; }
.beside { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 1rem; overflow-wrap: anywhere;
  margin-top: 3rem; padding-top: 1rem; border-top: 1px solid var(--line); }
.beside [rel=next] { margin-left: auto; text-align: right; }
main footer { margin-top: 1.5rem; font-size: .9rem; color: var(--soft); }
.search { margin: .8rem 0 0; } .search.large { max-width: 46rem; margin: 1rem 0; }
.search input { width: 100%; box-sizing: border-box; font: inherit; font-size: .9rem; padding: .3rem .5rem;
  color: inherit; background: var(--card); border: 1px solid var(--line); border-radius: .4rem; }
#results { padding-left: 1.6rem; } #results p { margin: .1rem 0 .8rem; font-size: .9rem; color: var(--soft); }
mark { background: none; color: inherit; font-weight: 650; }
.k, .kn, .ow, .kc { color: var(--word); } .s1, .s2, .sd, .s, .sa { color: var(--string); }
.c1 { color: var(--soft); } .mi, .mf { color: var(--figure); }
:root { --word: #0b57a8; --string: #1a7040; --figure: #8a4a00; }
@media (prefers-color-scheme: dark) { :root { --word: #79b8ff; --string: #7ed0a0; --figure: #e3b341; } }
@media (max-width: 56rem) {
  .site { display: block; }
  header { display: flex; flex-wrap: wrap; justify-content: space-between; padding: .8rem 0 .6rem; }
  header .search { width: 100%; margin-top: .5rem; }
  header { border-bottom: 1px solid var(--line); }
  header .down { display: inline; font-size: .95rem; }
  main { padding-top: 0; }
  nav { position: static; max-height: none; margin-top: 2rem; border-top: 1px solid var(--line); font-size: 1rem; }
  nav li { padding: .3rem 0; }
  main table:has(th:nth-child(3)) { min-width: 34rem; }
}
@media print { header, nav, .beside, .skip { display: none; } .site { display: block; } main { max-width: none; } }
"""
