// Claims: the ledger, judged one after the other; the chosen one; and the search that tries to break it.
import {element, move, post, start, trouble, value} from "./lab.js";

const at = id => document.getElementById(id), box = name => document.querySelector(`[data-name=${name}]`);
const rows = new Map(), verdicts = new Map();
let judging = false, shown = "", drawn = "";

// The claim stands between its verdict and its facts, and controls stand where they work.
at("verdict").after(at("chosen"), at("breaking"));
at("filters").append(box("verdict"), box("topic"));
at("budget").append(box("cases"), box("seed"));

start({
  preview(answer) {
    list(answer.ledger);
    if (!answer.claim) return filter();
    const {id, html, variants, note} = answer.claim;
    if (id !== shown) at("judged").innerHTML = drawn = "";
    shown = id;
    at("name").textContent = id;
    at("stated").innerHTML = html;
    attackable(variants, note);
    for (const [name, row] of rows) row.link.toggleAttribute("aria-current", name === id);
    filter();
    reveal(rows.get(id).item);
  },
  verdict(answer) {
    judged(answer);
    if (answer.html !== drawn) at("judged").innerHTML = drawn = answer.html;
    at("attack").disabled = false;
    told(answer.attack);
    setTimeout(judgeAll, 1500);
  },
  trouble(error) { if (error) at("attack").disabled = false; },
});

// ---- the ledger

function list(ledger) {
  if (rows.size) return;
  for (const {id, topic, plain} of ledger) {
    const badge = element("span", {class: "badge"}, "…");
    const link = element("a", {href: `/claims?claim=${id}`}, element("code", {}, id), badge, element("small", {}, plain));
    const item = element("li", {}, link);
    rows.set(id, {item, link, badge, topic});
    at("ledger").append(item);
  }
}

function judged({id, verdict}) {
  verdicts.set(id, verdict.word);
  const {badge} = rows.get(id);
  badge.className = `badge ${verdict.tone}`;
  badge.textContent = verdict.word;
  filter();
}

/** Judge what has not been, one at a time, so that whoever reads is never kept waiting. */
async function judgeAll() {
  if (judging) return;
  judging = true;
  for (const id of rows.keys()) {
    if (verdicts.has(id)) continue;
    const said = await post("claims/verdict", JSON.stringify({claim: id}));
    if (said.answer) judged(said.answer);
    if (said.error && !said.error.kind) { trouble(said.error); break; } // nobody is there any more
  }
  judging = false;
}

function filter() {
  const verdict = value("verdict"), topic = value("topic");
  let seen = 0;
  for (const [id, {item, topic: own}] of rows) {
    item.hidden = (topic !== "every" && own !== topic) || (verdict !== "every" && verdicts.get(id) !== verdict);
    seen += !item.hidden;
  }
  const left = rows.size - verdicts.size;
  at("count").textContent = `${seen} of ${rows.size} claims` + (left ? `, ${left} not judged yet` : ", all judged");
}

/** Bring the chosen claim into the list's own window, and move nothing else. */
function reveal(item) {
  const window = at("ledger").getBoundingClientRect(), own = item.getBoundingClientRect();
  if (own.top < window.top || own.bottom > window.bottom) at("ledger").scrollTop += own.top - window.top - 60;
}

// Links to other claims, from the list and from what a claim rests on, keep the filters.
document.addEventListener("click", event => {
  const link = event.target.closest("a[href^='/claims?claim=']");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  const words = new URLSearchParams();
  for (const name of ["verdict", "topic"]) if (value(name) !== "every") words.set(name, value(name));
  words.set("claim", new URL(link.href).searchParams.get("claim"));
  history.pushState(null, "", `?${words}`);
  dispatchEvent(new PopStateEvent("popstate"));
  if (matchMedia("(max-width: 46rem)").matches) at("verdict").scrollIntoView();
});

at("ledger").addEventListener("keydown", event => {
  const step = {ArrowDown: 1, ArrowUp: -1}[event.key];
  if (!step) return;
  event.preventDefault();
  const links = [...at("ledger").querySelectorAll("li:not([hidden]) a")];
  links[(links.indexOf(document.activeElement) + step + links.length) % links.length]?.focus();
});

// ---- the search

function attackable(names, note) {
  const now = value("variant");
  at("breaking").hidden = false;
  at("variants").hidden = at("budget").hidden = at("attack").hidden = !names.length;
  at("note").hidden = !note;
  at("note").textContent = note;
  const labels = names.map(name => {
    const radio = element("input", {type: "radio", name: "attacked", value: name});
    radio.checked = name === now;
    radio.addEventListener("change", () => move({variant: name, hunt: null}));
    return element("label", {}, radio, name);
  });
  const same = [...at("variants").querySelectorAll("input")].map(one => one.value).join() === names.join();
  if (!same) at("variants").replaceChildren(at("variants").firstElementChild, ...labels);
  else at("variants").querySelectorAll("input").forEach(one => { one.checked = one.value === now; });
}

function told(attack) {
  at("caught").hidden = !attack;
  at("outcome").textContent = attack?.says ?? "";
  at("case").innerHTML = attack?.html ?? "";
  if (attack?.reads) at("case").append(element("p", {class: "soft"}, attack.reads));
  if (attack) Object.assign(at("caught"), {className: `badge ${attack.tone}`, textContent: attack.word});
}

// Another press draws again.
at("attack").addEventListener("click", () => {
  at("attack").disabled = true;
  move(value("hunt") === true ? {seed: (value("seed") + 1) % 100} : {hunt: true});
});
