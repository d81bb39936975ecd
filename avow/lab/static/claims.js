// Claims: the ledger with the verdicts on record; the chosen one, whose proof runs again; the search; the quiz.
// A copy without a server has all of them in an element of its own, and proves and searches nothing.
import {draw} from "./chart.js";
import {element, move, start, value} from "./lab.js";
import {advance, corrected, question, quiz} from "./claims_quiz.js";
import {attackable, searched} from "./claims_search.js";
import {offerPython} from "./share.js";

const at = id => document.getElementById(id), box = name => document.querySelector(`[data-name=${name}]`);
const FILTERS = ["mode", "verdict", "topic"], PHONE = "(max-width: 46rem)";
const copy = at("static-data") && JSON.parse(at("static-data").textContent);
const rows = new Map();
let shown = "", drawn = "";

// The chosen claim stands above the state of its proof; then its picture, its formulas, and the evidence.
at("verdict").before(at("chosen"));
at("verdict").after(at("seen"), at("statement"), at("judged"), at("breaking"));

/** What a control says: in a copy the address and the controls are this script's own. */
const now = name => copy ? chosen[name] ?? read(name) : value(name);
const read = name => box(name).querySelector("input:checked")?.value;

quiz({go, ledger: rows});

// ---- with a server, and without one

if (!copy) start({
  proving: "the check runs again",
  preview(answer) {
    list(answer.ledger);
    if (answer.claim) open(answer.claim); else filter();
    // When this answer has been drawn: only then is another one asked for.
    if (!new URLSearchParams(location.search).has("claim")) queueMicrotask(first);
  },
  verdict(answer) {
    if (answer.html !== drawn) found(drawn = answer.html);
    because(answer);
  },
  trouble(error) { if (error?.name === "verdict") at("why").textContent = "The check did not end. The verdict is the one on record."; },
});

const chosen = copy && fromAddress();
if (copy) {
  for (const name of FILTERS) box(name).addEventListener("input", () => change({[name]: read(name)}));
  addEventListener("popstate", () => { Object.assign(chosen, {mode: null, verdict: null, topic: null, claim: null}, fromAddress()); become(); });
  list(copy.ledger);
  become();
  if (!chosen.claim) first();
}
// Whoever filters sees the first of what is left. Who turns to guessing has just read the verdict on this claim.
for (const name of FILTERS) box(name).addEventListener("input", () => {
  filter();
  if (name !== "mode") at("ledger").scrollTop = 0;
  if (now("mode") === "read") return first();
  question({id: shown, pool: pool()});
  advance();
});

function fromAddress() {
  return Object.fromEntries([...new URLSearchParams(location.search)].filter(([name]) => [...FILTERS, "claim"].includes(name)));
}

function become() {
  for (const name of FILTERS) {
    const wanted = chosen[name] ?? JSON.parse(box(name).dataset.default);
    box(name).querySelectorAll("input").forEach(one => { one.checked = one.value === wanted; });
  }
  const claim = copy.ledger.find(one => one.id === chosen.claim) ?? copy.ledger.find(one => one.id === copy.first);
  open({...claim, variants: [], note: "The search runs in avow lab, and not in a copy of its pages."});
  found(claim.judged);
  for (const [id, figure] of Object.entries(claim.figures)) draw(at(id), figure);
  at("mark").className = `badge ${claim.tone}`;
  at("mark").textContent = claim.word;
  at("says").textContent = claim.says;
  because(claim);
}

function change(changes) {
  if (!copy) return move(changes);
  Object.assign(chosen, changes);
  remember();
  become();
}

/** Open the first claim of the list where the filters have left the chosen one out. */
function first() {
  const left = [...rows].filter(([, one]) => !one.item.hidden);
  if (now("mode") === "read" && left.length && rows.get(shown)?.item.hidden) go(left[0][0], "read", "replaceState");
}

/** Go to another claim, in another mode if one is named; the filters stay. */
function go(claim, mode = now("mode"), how = "pushState") {
  const words = new URLSearchParams();
  for (const name of FILTERS) {
    const word = name === "mode" ? mode : now(name);
    if (word !== JSON.parse(box(name).dataset.default)) words.set(name, word);
  }
  words.set("claim", claim);
  try { history[how](null, "", `?${words}`); } catch { return change({mode, claim}); } // files have no history of their own
  dispatchEvent(new PopStateEvent("popstate"));
}

function remember() {
  const words = new URLSearchParams(Object.entries(chosen).filter(([, word]) => word));
  try { history.replaceState(null, "", `?${words}`); } catch { /* files have no history of their own */ }
}

// ---- the ledger

function list(ledger) {
  if (rows.size) return;
  for (const {id, topic, plain, recorded} of ledger) {
    const badge = element("span", {class: `badge ${recorded}`}, recorded);
    const link = element("a", {href: `?claim=${encodeURIComponent(id)}`}, element("span", {}, plain), element("code", {}, id), badge);
    const item = element("li", {}, link);
    rows.set(id, {item, link, topic, plain, recorded});
    at("ledger").append(item);
  }
  for (const [name, , counted] of counts()) for (const input of box(name).querySelectorAll("input")) {
    input.parentElement.append(element("small", {}));
    // No claim of the catalogue is only supported, and few people bring their own.
    input.parentElement.hidden = ![...rows.values()].some(one => counted(one, input.value));
  }
}

/** Each filter, the other one, and whether a claim is of a choice of it. */
function counts() {
  const recorded = (one, word) => word === "every" || one.recorded === word, topic = (one, word) => word === "every" || one.topic === word;
  const verdict = now("mode") === "read" ? now("verdict") : "every"; // guesses are of all verdicts
  return [["verdict", one => topic(one, now("topic")), recorded], ["topic", one => recorded(one, verdict), topic]];
}

function filter() {
  const guessing = now("mode") !== "read", verdict = now("verdict"), topic = now("topic");
  document.querySelector(".bench").classList.toggle("guessing", guessing);
  at("quiz").hidden = !guessing;
  let seen = 0;
  for (const one of rows.values()) {
    one.item.hidden = (topic !== "every" && one.topic !== topic) || (verdict !== "every" && one.recorded !== verdict);
    seen += !one.item.hidden;
  }
  for (const [name, others, counted] of counts()) for (const input of box(name).querySelectorAll("input")) {
    const many = [...rows.values()].filter(one => others(one) && counted(one, input.value)).length;
    input.parentElement.querySelector("small").textContent = ` ${many}`;
  }
  at("count").textContent = `${seen} of ${rows.size} claims`;
}

/** Bring the chosen claim into the list's own window, and move nothing else. */
function reveal(item) {
  const window = at("ledger").getBoundingClientRect(), own = item.getBoundingClientRect();
  if (own.top < window.top || own.bottom > Math.min(window.bottom, innerHeight)) at("ledger").scrollTop += own.top - window.top - 60;
}

// Links to other claims, from the list and from what a claim rests on, keep the filters.
document.addEventListener("click", event => {
  const link = event.target.closest("a[href^='?claim=']");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  go(new URLSearchParams(link.getAttribute("href")).get("claim"), "read");
  if (matchMedia(PHONE).matches || at("chosen").getBoundingClientRect().top < 0) at("chosen").scrollIntoView();
});

at("ledger").addEventListener("keydown", event => {
  const step = {ArrowDown: 1, ArrowUp: -1}[event.key];
  if (!step) return;
  event.preventDefault();
  const links = [...at("ledger").querySelectorAll("li:not([hidden]) a")];
  links[(links.indexOf(document.activeElement) + step + links.length) % links.length]?.focus();
});

// ---- the chosen claim

function open(claim) {
  filter();
  if (claim.id !== shown) {
    found(drawn = "");
    at("seen").hidden = !claim.pictured;
    at("name").textContent = claim.id;
    at("title").innerHTML = claim.title;
    at("why").textContent = "The check runs …";
    at("terms").replaceChildren(...claim.terms.flatMap(({label, value}) => [element("b", {}, label), `: ${value}. `]));
    at("stated").innerHTML = claim.html;
    // What is too wide is scrolled by keyboard, too.
    for (const one of at("main").querySelectorAll(":is(#title, #stated) .formula")) if (one.scrollWidth > one.clientWidth) one.tabIndex = 0;
    at("recorded").className = `badge ${claim.recorded}`;
    at("recorded").textContent = claim.recorded;
    at("meaning").textContent = claim.meaning;
    scene(claim.scene);
    offerPython(claim.python);
    for (const [name, row] of rows) row.link.toggleAttribute("aria-current", name === claim.id);
    at("chosen").hidden = at("breaking").hidden = false;
    reveal(rows.get(claim.id).item);
  }
  shown = claim.id;
  question({...claim, pool: pool()});
  attackable(claim);
  if (!copy) searched(claim);
}

/** Show what a proof found: its picture stands where room was kept for it. */
function found(html) {
  at("judged").innerHTML = html;
  at("seen").replaceChildren(...at("judged").querySelectorAll(":scope > :is(.caption, .figure, .scroll)"));
}

/** Say why the verdict is what it is, below the title and after a guess; what is true instead stands beside it. */
function because({id, reason}) {
  const instead = corrected(at("stated"));
  at("why").replaceChildren(element("p", {}, reason), ...(instead.length ? [element("b", {}, "True instead"), ...instead] : []));
  question({id, reason});
}

/** The statements to guess: those of the topic whose verdict is a plain one. */
function pool() {
  const asked = [...rows].filter(([, one]) => one.recorded !== "supported" && ["every", one.topic].includes(now("topic")));
  return asked.map(([id]) => id);
}

/** A link to where the claim can be seen by hand; in a copy, pages are files beside this one. */
function scene(place) {
  at("scene").hidden = !place;
  if (!place) return;
  at("scene").href = (copy ? `${place.page}.html` : `/${place.page}`) + (place.query && `?${place.query}`);
  at("scene").textContent = `${place.words} →`;
}
