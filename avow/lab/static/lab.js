// What every page shares: controls ↔ address ↔ requests. Previews follow every move, the last one wins; when nothing
// has moved for a moment, the verdict is asked for. Nothing is computed here but where things stand on the screen.
import {draw, svgText} from "./chart.js";
import {offerPicture, offerPython} from "./share.js";

const page = document.body.dataset.page;
const token = document.querySelector("meta[name=avow-token]")?.content; // a copy without a server has none
const at = id => document.getElementById(id);
const SETTLED = 220;
// A copy without a server has answers of its own: to the examples, and to nothing else.
const examples = JSON.parse(at("static-data")?.textContent ?? "null")?.examples;

const controls = new Map([...document.querySelectorAll("[data-name]")].map(box => [box.dataset.name, control(box)]));
const figures = new Map();
let state = {}, held = null, own = {}, moved = 0, holding = false;

/** Start a page: `preview(answer, fresh)` and `verdict(answer)` draw what is the page's own; an answer is fresh if nothing
 * has moved since it was asked for. `live()` is what the page itself expects of the verdict, ahead of the lab. */
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
    remember("pushState");
  }));
  at("file")?.addEventListener("change", upload);
  offerPicture(place => figures.has(place.id) ? svgText(figures.get(place.id)) : null);
  if (examples) for (const {box} of controls.values()) box.querySelectorAll("input").forEach(one => one.disabled = true);
  become(examples && !exampleOf(fromAddress()) ? examples[0].inputs : fromAddress());
}

/** The example whose inputs these are. */
const exampleOf = inputs => examples.find(one => [...controls].every(([name, {preset}]) =>
  (inputs[name] ?? preset) === (one.inputs[name] ?? preset)));

/** Change some inputs, as a control or a drag does; null gives one back to the page. */
export function move(changes) {
  moved = performance.now();
  for (const [name, value] of Object.entries(changes)) put(name, value);
  for (const [name, {box}] of controls) if (box.dataset.below && value(name) > last(box)) put(name, last(box));
  show();
  previews();
}

const put = (name, value) => {
  if (value === null || value === controls.get(name)?.preset) delete state[name]; else state[name] = value;
};

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

/** The last of as many things as another control counts. */
const last = box => value(box.dataset.below) - 1;

function show() {
  const write = ([name, one]) => { if (name in state || one.preset !== null) one.write(state[name] ?? one.preset); };
  [...controls].forEach(write);
  for (const pair of controls) {
    const [, one] = pair;
    if (one.box.dataset.below) { one.reach(last(one.box)); write(pair); }
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

let awake = false, flying = false, again = false, timer = 0, proving = null, expected = null;

async function previews() {
  proving?.abort();
  clearTimeout(timer);
  expect();
  if (flying) { again = true; return; }
  flying = true;
  let since = moved, coming = ask("preview");
  while (coming) {
    const answer = await coming, start = since;
    // While this one is drawn, the next one is computed; whatever moved between them is not asked for.
    [since, coming, again] = [moved, again ? ask("preview") : null, false];
    if (!answer) continue;
    awake = true;
    expected = answer.live ?? null;
    take(answer);
    own.preview?.(answer, start === moved);
    if (at("trouble").hidden) expect();
    drawFigures(answer);
    // What was drawn is on the screen when the frame it belongs to is over.
    requestAnimationFrame(() => setTimeout(() => performance.measure("avow:paint", {start, end: performance.now()})));
  }
  flying = false;
  settle();
}

/** While something moves: what float arithmetic expects of the verdict, if the page says so. */
function expect() {
  at("verdict").setAttribute("aria-busy", "true");
  expected = own.live?.() ?? expected;
  if (expected) mark(`${expected.tone} live`, `≈ ${expected.word}`, expected.says, []);
  else if (awake) mark("none", "preview", "float arithmetic, while you move", []);
  else mark("none", "starting …", "the arithmetic wakes up", []);
}

function settle() {
  clearTimeout(timer);
  if (!holding && !flying) timer = setTimeout(prove, SETTLED);
}

/** Keep the state in the address; a page that was opened from a disk may have none to keep it in. */
function remember(how) {
  try { history[how](null, "", (address() || location.pathname) + location.hash); } catch { /* the page goes on as it is */ }
}

async function prove() {
  if (location.search !== address()) remember("replaceState");
  if (at("verdict").hidden || !at("trouble").hidden) return;
  if (examples && !exampleOf(state)) { at("verdict").dataset.proving = "a proof needs Python"; return; }
  proving = new AbortController();
  const mine = proving;
  if (expected) at("verdict").dataset.proving = "proving …";
  else mark("none", "proving …", own.proving ?? "ball arithmetic, every rounding included", []);
  const answer = await ask("verdict", mine.signal);
  if (!answer || mine.signal.aborted) return;
  take(answer);
  const {tone, word, says, steps} = answer.verdict;
  mark(tone, word, says, steps);
  at("verdict").removeAttribute("aria-busy");
  own.verdict?.(answer);
  drawFigures(answer);
}

/** What the lab says to a request: an answer or an error; neither where it was given up. */
export async function post(path, body, signal) {
  const kind = typeof body === "string" ? {"Content-Type": "application/json"} : {};
  try {
    const got = await fetch(`/api/${path}`, {method: "POST", signal, body, headers: {...kind, "X-Avow-Token": token}});
    const said = await got.json();
    return said.error?.name === "x-avow-token" && reloaded() ? new Promise(() => {}) : said;
  } catch (problem) {
    if (problem.name === "AbortError") return {};
    return {error: {name: "the lab", rule: "does not answer", remedy: "start avow lab again, and open the address it prints"}};
  }
}

/** Load the page again where the lab was started again meanwhile, with all that is set; once, and false from then on. */
function reloaded() {
  if (sessionStorage.getItem("avow-refused") === token) return false;
  sessionStorage.setItem("avow-refused", token);
  if (controls.size) history.replaceState(null, "", (address() || location.pathname) + location.hash); // other pages keep their own
  location.reload();
  return true;
}

/** What the page answers to its inputs; null where it was given up, or failed and the page says why. */
async function ask(what, signal) {
  if (examples) {
    const example = exampleOf(state);
    for (const one of [at("facts"), ...document.querySelectorAll(".figure")]) one.classList.toggle("stale", !example);
    if (at("set-to")) at("set-to").textContent = example ? "This example is set to:" : "Set by hand to:";
    if (!example) offerPython(null);
    return example?.[what] ?? null;
  }
  const said = await post(`${page}/${what}`, JSON.stringify(held ? {...state, file: held} : state), signal);
  if (signal?.aborted) return null;
  trouble(said.error);
  return said.answer ?? null;
}

/** Send the file that was chosen; without one, the page goes on as it began. */
async function upload() {
  const file = at("file").files[0], said = file ? await post("files", file) : {};
  held = said.file ?? null;
  at("held").textContent = Object.entries(said.tensors ?? {}).map(([n, x]) => `${n}: ${x.shape.join("×")}`).sort().join(", ");
  if (said.error) trouble(said.error, "file"); else move({});
}

/** Say what is wrong beside the field it is about, or above all where that cannot be seen; nothing is proved until it is fixed. */
export function trouble(error, name = error?.name) {
  const message = at("trouble"), field = error && (controls.get(name)?.box ?? at(name)?.closest(".control"));
  const beside = field && !field.hidden ? field : null;
  if (!error && message.hidden) return;
  document.querySelectorAll("[aria-invalid]").forEach(one => one.removeAttribute("aria-invalid"));
  beside?.querySelector("input").setAttribute("aria-invalid", "true");
  // A file that was of no use is let go, and can be chosen again when it is fixed: the same one would be no change.
  if (beside?.contains(at("file"))) { held = null; at("file").value = at("held").textContent = ""; }
  if (beside) beside.append(message); else document.querySelector(".over").append(message);
  document.querySelector(".bench").classList.toggle("mistaken", !!error);
  message.hidden = !error;
  if (error) {
    message.textContent = `${error.name}${error.value ? "=" + error.value : ""} ${error.rule}; ${error.remedy}`;
    mark("none", "no answer", "nothing is computed until this is fixed", []);
    expected = null;
  }
  own.trouble?.(error);
}

// ---- what was found

function mark(tone, word, says, steps) {
  delete at("verdict").dataset.proving;
  if (at("mark").className === `badge ${tone}` && at("mark").textContent === word && at("says").textContent === says) return;
  at("mark").className = `badge ${tone}`;
  at("mark").textContent = word;
  at("says").textContent = says;
  at("facts").classList.toggle("sure", tone === "proved" || tone === "refuted");
  const details = at("steps").parentElement;
  details.hidden = !steps.length;
  at("steps").replaceChildren(...steps.map(step => element("li", {}, step)));
}

/** A number with three digits; all of them are there for the pointer. */
function fact(label, value, about) {
  const few = digits(value, label), made = element("dd", few === value ? {} : {title: value}, few);
  if (about) made.append(element("small", {}, about));
  return made;
}

/** A text whose numbers have at most three digits after leading zeros; whole numbers stay whole, and bounds stay bounds. */
export function digits(text, label = "") {
  return text.replace(/(≤ ?|≥ ?)?(?<![\w.,^])(\d+)\.(\d+)(e[+-]?\d+)?(?![\w.])/g, (whole, sign, units, rest, power = "") => {
    const number = Number(`${units}.${rest}${power}`), size = Math.floor(Math.log10(number));
    if (!number || (units + rest).replace(/^0+/, "").length <= 3) return whole;
    const step = 10 ** Math.min(0, size - 2), parts = number / step, near = Math.round(parts);
    const up = /^≤/.test(sign) || (!sign && /at most|≤/.test(label)), down = /^≥/.test(sign) || (!sign && /at least|≥/.test(label));
    const exact = Math.abs(parts - near) < 1e-9 * parts, count = exact ? near : up ? Math.ceil(parts) : down ? Math.floor(parts) : near;
    if (Math.log10(count * step) >= size + 1 && !exact) return whole; // 0.9996 is not 1
    const few = power || size < -4 ? (count * step).toExponential(2) : (count * step).toFixed(Math.max(0, 2 - size));
    return (sign ?? "") + few.replace(/e([+-])(\d)$/, "e$10$2");
  });
}

function take(answer) {
  for (const [name, number] of Object.entries(answer.shown ?? {})) if (!(name in state)) controls.get(name)?.write(number);
  if (answer.facts) at("facts").replaceChildren(...answer.facts.flatMap(({label, value, about}) => [
    element("dt", {}, label), fact(label, value, about)]));
  if ("python" in answer) offerPython(answer.python);
}

/** Draw figures in the places that the page has for them by now. */
function drawFigures(answer) {
  for (const [id, figure] of Object.entries(answer.figures ?? {})) {
    const before = figures.get(id)?.traces, known = before?.length === figure.traces.length;
    const traces = figure.traces.map((trace, i) => trace ?? (known && before[i]));
    if (!at(id) || !traces.every(Boolean)) continue; // what is not known yet comes with the verdict
    figures.set(id, {...figure, traces});
    draw(at(id), figures.get(id));
  }
}

/** An element with attributes and children. */
export function element(name, attributes, ...children) {
  const space = ["svg", "g", "circle", "line", "path", "text", "ellipse", "polygon", "title"].includes(name);
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
    return {box, preset, read: () => all.find(one => one.checked)?.value, parse: String,
      write: word => all.forEach(one => one.checked = one.value === word)};
  }
  if (kind === "switch") return {box, preset, read: () => input.checked, parse: word => ({true: true, false: false})[word] ?? word,
    write: on => input.checked = on === true};
  if (kind === "text") return {box, preset, read: () => input.value, parse: String,
    write: word => { if (input.value !== word) input.value = word ?? ""; }};
  const {log} = box.dataset, output = box.querySelector("output");
  const [low, high, fine] = [box.dataset.low, box.dataset.high, log ? 0.01 : box.dataset.step].map(Number);
  // The last step of a slider in factors reaches its end, or would go beyond it.
  const [there, back] = log ? [Math.log10, x => Math.min(high, Number((10 ** x).toPrecision(3)))] : [Number, Number];
  const reach = most => input.max = log ? there(low) + fine * Math.ceil((there(most) - there(low)) / fine - 1e-6) : most;
  Object.assign(input, {min: there(low), step: fine});
  reach(high);
  // What is no number is left for the lab to say so.
  return {box, preset, reach, read: () => back(input.value), parse: word => word.trim() && Number.isFinite(Number(word)) ? Number(word) : word,
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
