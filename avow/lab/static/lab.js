// What every page shares: controls ↔ address ↔ requests. Previews follow every move, the last one wins; when nothing
// has moved for a moment, the verdict is asked for. Nothing is computed here but where things stand on the screen.
import {followed, remember} from "./moved.js";
import {themed} from "./themed.js";

const page = document.body.dataset.page;
const token = document.querySelector("meta[name=avow-token]").content;
const at = id => document.getElementById(id);
const CALM = 90, QUICK = 35, SETTLED = 220, RESTED = 400;
const CONFIG = {responsive: true, displayModeBar: false};

const controls = new Map([...document.querySelectorAll("[data-name]")].map(box => [box.dataset.name, control(box)]));
const figures = new Map();
let state = {}, held = null, own = {}, moved = 0, holding = false;

/** Start a page: `preview(answer)` and `verdict(answer)` draw what is the page's own. */
export function start(drawing) {
  own = drawing;
  for (const [name, one] of controls) {
    one.box.addEventListener("input", () => move({[name]: one.read()}));
    one.box.addEventListener("pointerdown", () => hold(true));
  }
  addEventListener("pointerup", () => hold(false));
  addEventListener("pointercancel", () => hold(false));
  addEventListener("popstate", () => become(fromAddress()));
  at("controls").addEventListener("submit", event => event.preventDefault());
  document.querySelectorAll("[data-preset]").forEach(button => button.addEventListener("click", () => {
    become(JSON.parse(button.dataset.preset));
    history.pushState(null, "", address());
  }));
  at("file")?.addEventListener("change", upload);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => figures.forEach((_, id) => paint(id)));
  become(fromAddress());
}

/** Change some inputs, as a control or a drag does; null gives one back to the page. */
export function move(changes) {
  moved = performance.now();
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === controls.get(name)?.preset) delete state[name]; else state[name] = value;
  }
  show();
  previews();
}

/** Between taking hold of something and letting go, no verdict is asked for. */
export function hold(on) {
  holding = on;
  if (!on) settle();
}

/** What the controls say now: what was set, else what the page took. */
export const value = name => state[name] ?? controls.get(name).read();

function become(wanted) {
  state = {...wanted};
  moved = performance.now();
  show();
  previews();
}

function show() {
  for (const [name, one] of controls) if (name in state || one.preset !== null) one.write(state[name] ?? one.preset);
  for (const one of controls.values()) {
    const rules = Object.entries(JSON.parse(one.box.dataset.when ?? "{}"));
    one.box.hidden = one.box.dataset.quiet || !rules.every(([name, words]) => words.includes(value(name)));
  }
  document.querySelectorAll("[data-preset]").forEach(button => {
    const wanted = JSON.parse(button.dataset.preset), names = new Set(presetNames());
    const same = [...names].every(name => (state[name] ?? controls.get(name).preset) ===
      (wanted[name] ?? controls.get(name).preset));
    button.setAttribute("aria-pressed", same);
  });
}

// Presets differ in these; what else a reader moves does not unmake them.
const presetNames = () => [...document.querySelectorAll("[data-preset]")]
  .flatMap(button => Object.keys(JSON.parse(button.dataset.preset)));

// ---- requests

let awake = false, flying = false, again = false, timer = 0, proving = null;

async function previews() {
  proving?.abort();
  clearTimeout(timer);
  mark("none", ...(awake ? ["preview", "float arithmetic, while you move"] : ["starting …", "the arithmetic wakes up"]), []);
  if (flying) { again = true; return; }
  flying = true;
  let since = moved, coming = ask("preview");
  while (coming) {
    const answer = await coming, start = since;
    // While this one is drawn, the next one is computed; whatever moved between them is not asked for.
    [since, coming, again] = [moved, again ? ask("preview") : null, false];
    if (!answer) continue;
    if (!awake) mark("none", "preview", "float arithmetic, while you move", []);
    awake = true;
    take(answer);
    own.preview?.(answer);
    // What was drawn is on the screen when the frame it belongs to is over.
    requestAnimationFrame(() => setTimeout(() => performance.measure("avow:paint", {start, end: performance.now()})));
  }
  flying = false;
  settle();
}

function settle() {
  clearTimeout(timer);
  if (!holding && !flying) timer = setTimeout(prove, SETTLED);
}

async function prove() {
  if (location.search !== address()) history.replaceState(null, "", address() || location.pathname);
  if (at("verdict").hidden || !at("trouble").hidden) return;
  proving = new AbortController();
  const mine = proving;
  mark("none", "proving …", own.proving ?? "ball arithmetic, every rounding included", []);
  const answer = await ask("verdict", mine.signal);
  if (!answer || mine.signal.aborted) return;
  take(answer);
  const {tone, word, says, steps} = answer.verdict;
  mark(tone, word, says, steps);
  own.verdict?.(answer);
}

/** One request; null where it failed, and the reader has been told why, or where it was given up. */
export async function ask(what, signal) {
  const body = JSON.stringify(held ? {...state, file: held} : state);
  try {
    const got = await fetch(`/api/${page}/${what}`, {method: "POST", signal, body,
      headers: {"Content-Type": "application/json", "X-Avow-Token": token}});
    const said = await got.json();
    trouble(said.error);
    return said.answer ?? null;
  } catch (problem) {
    if (problem.name === "AbortError") return null;
    trouble({name: "the lab", value: "", rule: "does not answer", remedy: "start avow lab again, and reload"});
    return null;
  }
}

async function upload() {
  const file = at("file").files[0];
  if (!file) return;
  const got = await fetch("/api/files", {method: "POST", body: file, headers: {"X-Avow-Token": token}});
  const said = await got.json();
  trouble(said.error);
  held = said.file ?? null;
  at("held").textContent = Object.entries(said.tensors ?? {}).map(([n, x]) => `${n}: ${x.shape.join("×")}`).join(", ");
  if (held) move({});
}

function trouble(error) {
  at("trouble").hidden = !error;
  own.trouble?.(error);
  if (error) at("trouble").textContent = `${error.name}${error.value ? " = " + error.value : ""} ${error.rule}; ${error.remedy}`;
}

// ---- what was found

function mark(tone, word, says, steps) {
  if (tone === "none" && at("mark").textContent === word && at("says").textContent === says) return;
  at("mark").className = `badge ${tone}`;
  at("mark").textContent = word;
  at("says").textContent = says;
  at("facts").classList.toggle("sure", tone === "proved" || tone === "refuted");
  const details = at("steps").parentElement;
  details.hidden = !steps.length;
  at("steps").replaceChildren(...steps.map(step => element("li", {}, step)));
}

function take(answer) {
  for (const [name, number] of Object.entries(answer.shown ?? {})) if (!(name in state)) controls.get(name)?.write(number);
  if (answer.facts) at("facts").replaceChildren(...answer.facts.flatMap(({label, value, about}) => [
    element("dt", {}, label), element("dd", {}, value, ...(about ? [element("small", {}, about)] : []))]));
  spent = 0;
  for (const [id, {data, layout}] of Object.entries(answer.figures ?? {})) {
    const before = figures.get(id)?.data, known = before?.length === data.length;
    const whole = data.map((trace, i) => trace ?? (known && before[i]));
    if (!whole.every(Boolean)) continue; // what is not known yet comes with the verdict
    figures.set(id, {data: whole, layout});
    draw(id);
  }
}

let loading = null;
const plotly = () => loading ??= new Promise((done, failed) => {
  const script = element("script", {src: "/plotly.js"});
  script.onload = done;
  script.onerror = failed;
  document.head.append(script);
});

// What is drawn follows every move in place. Figures that plotly must draw do so in their order, as long as they are
// quickly drawn, all together; the others wait until nothing has moved for a moment.
const waiting = new Map(), took = new Map();
let spent = 0;
function draw(id) {
  clearTimeout(waiting.get(id));
  const {data, layout} = figures.get(id), cost = took.get(id) ?? Infinity;
  const calm = followed(at(id), data, layout) ? RESTED : spent + cost > QUICK ? CALM : 0;
  if (calm) { waiting.set(id, setTimeout(() => paint(id), calm)); return; }
  spent += cost;
  paint(id);
}

async function paint(id) {
  await plotly();
  const place = at(id), {data, layout} = figures.get(id), look = themed(layout), words = JSON.stringify([data, look]);
  if (!place || (place.words === words && !place.drawn?.stale)) return;
  const since = performance.now();
  place.words = words;
  Plotly.react(id, data, look, CONFIG);
  remember(place, data, layout);
  took.set(id, performance.measure("avow:figure", {start: since}).duration);
}

/** An element with attributes and children. */
export function element(name, attributes, ...children) {
  const space = ["svg", "g", "circle", "line", "path", "text", "ellipse", "polygon"].includes(name);
  const made = space ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// ---- controls and the address

function control(box) {
  const {kind} = box.dataset, preset = JSON.parse(box.dataset.default);
  const input = box.querySelector("input");
  if (kind === "choice") {
    const all = [...box.querySelectorAll("input")];
    return {box, preset, read: () => all.find(one => one.checked)?.value, parse: word => word,
      write: word => all.forEach(one => one.checked = one.value === word)};
  }
  if (kind === "switch") return {box, preset, read: () => input.checked, parse: word => word === "true",
    write: on => input.checked = on};
  if (kind === "text") return {box, preset, read: () => input.value, parse: word => word,
    write: word => { if (input.value !== word) input.value = word ?? ""; }};
  const {low, high, step, log} = box.dataset, output = box.querySelector("output");
  const [there, back] = log ? [Math.log10, x => Number((10 ** x).toPrecision(3))] : [Number, Number];
  Object.assign(input, {min: there(low), max: there(high), step: log ? 0.01 : step});
  return {box, preset, read: () => back(input.value), parse: Number,
    write: number => {
      input.value = there(number);
      output.textContent = brief(number);
      input.setAttribute("aria-valuetext", brief(number));
    }};
}

/** A number as a reader wants it. */
export function brief(number) {
  const size = Math.abs(number);
  if (!Number.isFinite(number) || (Number.isInteger(number) && size < 1e6)) return String(number);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return number.toExponential(1);
  return String(Number(number.toPrecision(3)));
}

function fromAddress() {
  const found = {};
  for (const [name, word] of new URLSearchParams(location.search)) {
    const one = controls.get(name);
    if (one) found[name] = one.parse(word);
  }
  return found;
}

function address() {
  const words = new URLSearchParams(Object.entries(state).map(([name, value]) => [name,
    typeof value === "number" ? String(Number(value.toPrecision(6))) : String(value)])).toString();
  return words && "?" + words;
}
