// A square of the map of kinds, or the address #head-LAYER-HEAD, opens a head: its kind, its figures, what rows read.
const profile = JSON.parse(document.getElementById("heads").textContent);
const squares = document.getElementById("squares");
const opened = document.getElementById("head");
const square = (layer, head) => document.getElementById(`square-${layer}-${head}`);
const CONTEXT = 5;

const make = (tag, kind, text) => {
  const element = document.createElement(tag);
  if (kind) element.className = kind;
  element.textContent = text;
  return element;
};
// A token as it is written; what cannot be seen has a sign.
const written = (j) => {
  const word = profile.words[j];
  if (word === undefined) return `#${j}`;
  return word.trim() || word === "" ? word : word.replaceAll("\n", "⏎").replaceAll(" ", "␣").replaceAll("\t", "⇥");
};
const distance = (i, j) => (j === i ? "itself" : j < i ? `${i - j} back` : `${j - i} ahead`);

function reading([i, tokens]) {
  const item = make("li", "", "");
  const line = make("span", "row", "");
  const before = [];
  for (let j = Math.max(i - CONTEXT, 0); j < i; j += 1) before.push(written(j));
  line.append(make("span", "soft", `…${before.join("")}`), make("b", "", written(i)));
  line.append(make("span", "soft", ` token ${i}`));
  item.append(line, make("span", "soft", " reads "));
  for (const [j, percent] of tokens) {
    const token = make("span", "token", "");
    token.style.setProperty("--weight", `${percent}%`);
    if (j > 0) token.append(make("span", "soft", written(j - 1)));
    token.append(make("b", "", written(j)));
    token.append(make("span", "soft", ` ${percent}%, ${j === 0 ? "first token" : distance(i, j)}`));
    item.append(token, " ");
  }
  return item;
}

function open(layer, head) {
  const chosen = profile.heads[layer]?.[head];
  if (!chosen) return;
  const title = make("h3", "", `Layer ${layer}, head ${head}: `);
  title.append(make("span", `kind ${chosen.kind}`, chosen.kind));
  const list = make("ul", "readings", "");
  list.append(...chosen.readings.map(reading));
  opened.replaceChildren(title, make("p", "", chosen.rule), make("p", "soft", chosen.facts), list);
  for (const other of squares.querySelectorAll("button")) {
    other.tabIndex = -1;
    other.setAttribute("aria-pressed", "false");
  }
  square(layer, head).tabIndex = 0;
  square(layer, head).setAttribute("aria-pressed", "true");
}

const place = (button) => button.id.split("-").slice(1).map(Number);
squares.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button) location.replace(`#head-${place(button).join("-")}`);
});
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
squares.addEventListener("keydown", (event) => {
  const step = ARROWS[event.key];
  if (!step || !event.target.closest("button")) return;
  event.preventDefault();
  const [layer, head] = place(event.target);
  const next = square(layer + step[0], head + step[1]);
  if (!next) return;
  next.focus();
  location.replace(`#head-${place(next).join("-")}`);
});
function follow() {
  const named = location.hash.match(/^#head-(\d+)-(\d+)$/);
  if (named) open(Number(named[1]), Number(named[2]));
}
addEventListener("hashchange", follow);
open(...profile.first);
follow();
