// "Guess first": a statement, three answers, the verdict with its reason, and a score that lasts as long as the tab.
import {element} from "./lab.js";

const at = id => document.getElementById(id);
const KEPT = "avow claims guesses";
const SAID = {proved: "true", refuted: "false", corrected: "true after a correction"};
const buttons = [...document.querySelectorAll("#guesses button")];
let guesses = restored(), claim = {}, pool = [], ledger = new Map(), go = null;

/** Start the quiz: `page.go(id, mode)` opens a claim, `page.ledger` has sentences and recorded verdicts by id. */
export function quiz(page) {
  ({go, ledger} = page);
  for (const button of buttons) button.addEventListener("click", () => guess(button.dataset.guess));
  at("next").addEventListener("click", onward);
  at("restart").addEventListener("click", () => {
    guesses = {};
    keep();
    at("finished").hidden = true;
    show();
    onward();
  });
  // Digits answer while the focus is in the quiz, and nowhere else.
  for (const id of ["modes", "quiz"]) at(id).addEventListener("keydown", event => {
    const button = buttons[Number(event.key) - 1];
    if (!button || at("quiz").hidden || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    button.click();
  });
}

/** Take what is known of the chosen claim: it is asked, and shown if it has been answered. */
export function question(known) {
  const other = known.id !== claim.id;
  if (known.pool) pool = known.pool;
  claim = other ? known : {...claim, ...known};
  if (other || known.html) {
    at("asked").innerHTML = claim.title;
    at("formulas").innerHTML = claim.html;
    at("instead").replaceChildren();
    at("finished").hidden = true;
  }
  show();
}

// Sentences without a formula are asked first, with all three answers among them; the page opens with the first.
const EASY = ["copy-possible", "softmax-categorical", "heads-identical", "features-variance", "permutation"];
/** A fixed order: the easy ones, other sentences, then those with formulas, with topics and verdicts mixed. */
const mixed = ids => [...ids].sort((a, b) => place(a) - place(b));
const place = id => EASY.includes(id) ? EASY.indexOf(id) - EASY.length
  : [...id].reduce((sum, letter) => (sum * 31 + letter.codePointAt(0)) % 100003, /[\d(^…Ͱ-Ͽ]/.test(ledger.get(id).plain) ? 200003 : 7);

function guess(word) {
  if (guesses[claim.id]) return;
  guesses[claim.id] = word;
  keep();
  show();
  at("next").focus({preventScroll: true});
}

/** The next statement without an answer, after this one and then from the start. */
export function advance() {
  const order = mixed(pool), from = order.indexOf(claim.id);
  const next = [...order.slice(from + 1), ...order.slice(0, from + 1)].find(id => !guesses[id]);
  if (!next) return finish();
  if (next === claim.id) show(); else go(next, "guess first");
}

function onward() {
  advance();
  if (at("finished").hidden) at("asked").focus({preventScroll: true});
}

function show() {
  const done = guesses[claim.id], answered = [...ledger.keys()].filter(id => guesses[id]), right = answered.filter(correct);
  const order = mixed(pool);
  at("asking").hidden = !at("finished").hidden;
  at("question").textContent = `Statement ${order.indexOf(claim.id) + 1} of ${order.length}. Is it true?`;
  at("score").textContent = answered.length ? `${right.length} of ${answered.length} right` : "";
  at("restart").hidden = !answered.length;
  at("reveal").hidden = !done;
  for (const button of buttons) {
    button.setAttribute("aria-pressed", button.dataset.guess === done);
    button.setAttribute("aria-disabled", !!done);
    button.classList.toggle("sound", !!done && button.dataset.guess === claim.recorded);
  }
  if (!done) return;
  at("answer").className = `badge ${claim.recorded}`;
  at("answer").textContent = claim.recorded;
  at("right").textContent = `${done === claim.recorded ? "Right" : "No"}: it is ${SAID[claim.recorded]}.`;
  at("because").textContent = claim.meaning;
  // The sentence is enough here; the formulas stand on the claim's own page.
  const instead = corrected(at("formulas"));
  at("instead").replaceChildren(...(instead.length ? [element("h3", {}, "What is true instead"), ...instead] : []));
  at("reason").textContent = claim.reason ?? "The check runs …";
  at("open").href = `?claim=${encodeURIComponent(claim.id)}`;
}

/** What is true instead of a claim, in words, with the terms that are too long for them. */
export const corrected = place => [...place.querySelectorAll(".instead > :is(.says, .term)")].map(one => one.cloneNode(true));

const correct = id => guesses[id] === ledger.get(id).recorded;

function finish() {
  const wrong = mixed(pool).filter(id => !correct(id));
  const [title, missed, list] = [at("finished").querySelector("h2"), at("missed"), at("finished").querySelector("ul")];
  title.textContent = `You guessed ${pool.length - wrong.length} of ${pool.length} right.`;
  missed.textContent = wrong.length ? "These are otherwise:" : "Nobody needs to tell you about attention.";
  list.replaceChildren(...wrong.map(id => {
    const {plain, recorded} = ledger.get(id);
    return element("li", {}, element("a", {href: `?claim=${encodeURIComponent(id)}`}, plain), ` It is ${SAID[recorded]}.`);
  }));
  at("finished").hidden = false;
  at("asking").hidden = true;
  title.focus();
}

function restored() {
  try { return JSON.parse(sessionStorage.getItem(KEPT)) ?? {}; } catch { return {}; }
}

function keep() {
  try { sessionStorage.setItem(KEPT, JSON.stringify(guesses)); } catch { /* the score then lasts as long as the page */ }
}
