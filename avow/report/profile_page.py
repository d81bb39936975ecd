"""The report of a profile, as a page that can be read in a minute."""

from __future__ import annotations

from html import escape
from typing import Any

from avow.integrations.transformers.profiling import CERTIFIED, NEAR, ROWS, Profile
from avow.report.charts import html_table
from avow.report.document import report
from avow.report.profile_figures import kinds_figure, number_figure, reading_figure
from avow.report.profile_table import headline, heads_table, kinds_table, methods_table, speed_table

_STYLE = """
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 0 1.5rem; }
.pair h2 { margin-top: 1.6rem; }
.heads td:nth-child(3), .heads th:nth-child(3) { text-align: left; }
details { margin-top: 2rem; }
summary { cursor: pointer; font-size: 1.15rem; font-weight: 650; }
dt { font-weight: 650; } dd { margin: 0 0 .4rem; color: var(--soft); max-width: 46rem; }
@media print { .heads table { font-size: 5.6pt; } .heads th, .heads td { padding: .1rem .15rem; } }
"""


def profile_page(profile: Profile, command: str, machine: str) -> str:
    """The whole report; `command` is what made it, `machine` where."""
    figures: dict[str, Any] = {"kinds": kinds_figure(profile), "reading": reading_figure(profile, "sparse")}
    small = ""
    for id, (title, words, figure) in _small(profile).items():
        figures[id] = figure
        small += f'<div><h2>{title}</h2>\n<p class="soft">{words}</p>\n{_figure(id, profile)}</div>\n'
    body = f"""<p class="soft">{profile.tokens:,} tokens of text, {len(profile.layers)} attention layers,
{len(profile.heads)} heads. Each square below is a head: layers go from left to right, the heads of a
layer from top to bottom.</p>
{_speed(profile)}<h2>What each head does</h2>
<p class="soft">{_KINDS}</p>
{_figure("kinds", profile)}
{html_table(kinds_table(profile))}
<p class="soft">Columns 90% to 99.9%: how many tokens have that share of a row's mass. Medians over heads of averages
over rows.</p>
<h2>What a tolerance of {profile.tol:g} would have each head read</h2>
<p class="soft">{_READING}</p>
{_figure("reading", profile)}
<h2>What each method offers</h2>
<p class="soft">{_METHODS.format(tol=profile.tol, budget=f"{profile.budget:.0%}")}</p>
{html_table(methods_table(profile))}
<div class="pair">{small}</div>
<details><summary>Every figure of every head</summary>
<p class="soft">{_EVERY}</p>
<div class="heads">{html_table(heads_table(profile))}</div></details>
<h2>How this was measured</h2>
<p class="soft"><code>{escape(command)}</code> on {escape(machine)}, {profile.seconds:.0f} s. The model's fingerprint is
<code>{profile.fingerprint}</code>.</p>
<p class="soft">{_METHOD}</p>"""
    return report("avow profile", headline(profile), body, figures, _STYLE)


def _speed(profile: Profile) -> str:
    """What the user will get, before anything else."""
    if profile.speed is None:
        return ""
    return f"""<h2>What a new token costs</h2>
<p class="soft">{_SPEED}</p>
{html_table(speed_table(profile.speed))}
<p>{escape(profile.speed.verdict[0].upper() + profile.speed.verdict[1:])}.</p>
"""


def _small(profile: Profile) -> dict[str, tuple[str, str, Any]]:
    """Maps of single numbers: title, what it is, figure."""
    return {
        "tokens": (
            "Tokens for 99% of the mass",
            "The fewest tokens that together have 99% of a row's weight, on average.",
            number_figure(profile, lambda head: head.figures.tokens[1], log=True),
        ),
        "entropy": (
            "Entropy",
            "Of a row's weights, in nats: its exponential is how many tokens it is as good as spread over.",
            number_figure(profile, lambda head: head.figures.entropy),
        ),
        "spread": (
            "Spread of logits",
            "The largest logit of a row less its smallest. Random features need it small.",
            number_figure(profile, lambda head: head.figures.spread),
        ),
        "rank": (
            "Effective rank",
            "Of the sampled rows' weights: how many directions they use. Landmarks need it small.",
            number_figure(profile, lambda head: head.figures.effective_rank),
        ),
    }


def _figure(id: str, profile: Profile) -> str:
    most = max(len(heads) for heads in profile.layers.values())
    return f'<div class="figure" id="{id}" style="height: {min(6 + 1.3 * most, 40):.1f}rem"></div>'


_SPEED = (
    "Measured on this machine, behind this text, from the caches that <code>generate()</code> uses: all three took "
    "turns token by token. The figures below say what could be left unread, which is worth its price only on some "
    "machines and at some lengths: a cache asks its sketch where that pays, and else reads everything."
)
_KINDS = (
    "<b>Copying</b>: one token has at least half of a row's mass, on average. <b>Local</b>: the nearest "
    f"{NEAR} tokens have it. <b>Diffuse</b>: it is spread as if over at least half of the tokens seen. "
    "<b>Averaging</b>: none of these. The first that holds names the head."
)
_READING = (
    "The share of keys and values that <code>sparse</code> reads to go on from this text with a proof that the rest "
    "does not matter, its sketch included; 100% is what exact attention reads. Heads without a square could not."
)
_METHODS = (
    "Left: how many heads a method can prove {tol:g} for, and what that costs beside exact attention, predicted and "
    "measured (medians). Right: how many it can promise anything within {budget} of exact attention, and which bound "
    "(median and least). A bound of 2 or more says nothing and is not counted."
)
_EVERY = (
    "Norms are means; <i>logits</i> is the largest that norms allow; <i>first</i> is the mass on the text's first "
    "token; <i>exact</i> is what exact attention proves in this arithmetic; <i>plan</i>, <i>bound</i> and <i>share</i> "
    "are what the plan asks for, proves and costs."
)
_METHOD = (
    f"The model read the text once, with exact attention. Figures are averages over {ROWS} rows of each head, evenly "
    f"spaced, in float64. Every setting of every method was run and certified on {CERTIFIED} rows of the text's "
    "second half. Costs of sparse are bytes read in decoding: predicted from the tokens that have all but half the "
    "tolerance of the mass, measured as what was read; tables and plans count what is read for all heads that share "
    "keys. Costs of the others are times over the whole text: predicted from counted work, measured where the "
    "tolerance was proved. Bounds are of single layers and do not add up to one of the model: "
    "<code>avow verify</code> measures what a plan does to its predictions."
)
