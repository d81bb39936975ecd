// One head by hand: a stage on which the query and the keys can be dragged, and the weights as bars. While something is
// dragged, weights and what to expect of the verdict are computed here; proofs and all other numbers are the lab's.
import {dot, keeps, minus, tie, times} from "./cone.js";
import {brief, element, hold, move, start, value} from "./lab.js";
import {degrees, drawStage, moved, off, onScreen, onSphere, read, routed} from "./stage.js";

const svg = document.getElementById("stage"), bars = document.getElementById("weights");
const keyboard = "drag it, or use the arrow keys";
const handle = element("g", {class: "handle", tabindex: 0, role: "slider"},
  element("circle", {r: 0.2, class: "reach"}), element("circle", {r: 0.07, class: "knob"}));
const keyring = element("g", {class: "keys"});
svg.append(element("g", {class: "scene"}), keyring, element("path", {class: "output", d: "M0 -.075l.075 .075l-.075 .075l-.075 -.075z"}));
// The words that a head of page 1 reads most and the one that asks there, as the address says them.
const carried = new URLSearchParams(location.hash.slice(1)), few = word => word.length > 11 ? `${word.slice(0, 10)}…` : word;
const asks = carried.get("asks") ?? "", words = carried.getAll("key");
document.getElementById("asks").textContent = asks && ` of “${asks}”`;
/** The word of a key, where keys stand for words. */
const wordOf = i => looking() ? words[i] ?? "" : "";
const looking = () => stage.show === "copy" || stage.show === "average";
// What is on the screen; whether it is ahead of what the lab has answered; whether any query does what is wanted.
let stage = null, ahead = false, possible = true;

start({
  preview(answer, fresh) {
    if (ahead && !fresh) return; // it is of a place that the hand has left
    ahead = false;
    show({...answer.stage, shares: null});
  },
  verdict({shares}) {
    if (shares) show({...stage, shares});
  },
  live: () => ahead ? expected() : null,
});

function show(next) {
  stage = next;
  possible = drawStage(svg, stage);
  if (!handle.isConnected) svg.append(handle);
  placeHandle();
  placeKeys();
  document.querySelectorAll("[data-scene]").forEach(one => one.hidden = !one.dataset.scene.split(" ").includes(stage.show));
  document.getElementById("replace").disabled = !looking() || !value("keys");
  document.getElementById("carried").hidden = !wordOf(0);
  bars.replaceChildren(...stage.weights.map((weight, i) => {
    const bar = element("span", {class: stage.wanted.includes(i) ? "wanted" : ""});
    bar.style.setProperty("--share", weight);
    const word = wordOf(i) ? [element("small", {title: wordOf(i)}, wordOf(i))] : [];
    return element("div", {}, bar, element("b", {}, String(i)), ...word, element("i", {}, weight.toFixed(weight < 0.01 ? 3 : 2)));
  }));
  bars.setAttribute("aria-label", "Weights: " + stage.weights.map((w, i) => `${key(i)} ${w.toFixed(3)}`).join(", "));
}

const key = i => `key ${i}${wordOf(i) && ` “${wordOf(i)}”`}`;

/** Show the scene with something moved, and have the lab follow. */
function draft(next, changes) {
  ahead = true;
  show(read({...next, shares: null}));
  move(changes);
}

// ---- what can be taken hold of

const drawn = ({kind, at}) => kind === "plane" || kind === "sphere" ? times(at, 1 / stage.unit) : at;

function placeHandle() {
  const {kind, name} = stage.handle, [x, y] = onScreen(drawn(stage.handle));
  handle.setAttribute("transform", `translate(${x} ${y})`);
  const now = kind === "ray" ? value("x") : value("angle");
  const words = kind === "ray" ? `scaled by ${brief(now)}` : kind === "ring" ? `at ${brief(now)} degrees` :
    `direction ${brief(now)} degrees, ${kind === "sphere" ? `height ${brief(value("rise"))} degrees, ` : ""}length ${brief(value("length"))}`;
  const [low, high] = kind === "ray" ? [-1, 2] : [-180, 180];
  describe(handle, {"aria-label": `The ${name}${asks && looking() ? ` of “${asks}”` : ""}: ${keyboard}`,
    "aria-valuenow": now, "aria-valuemin": low, "aria-valuemax": high, "aria-valuetext": words});
}

const describe = (one, words) => { for (const [key, word] of Object.entries(words)) one.setAttribute(key, word); };
const movable = () => stage.handle.name === "query";

function placeKeys() {
  while (keyring.children.length > stage.keys.length) keyring.lastElementChild.remove();
  while (keyring.children.length < stage.keys.length) {
    const i = keyring.children.length;
    const made = element("g", {}, element("circle", {class: "knob"}), element("text", {}), element("title", {}));
    made.addEventListener("keydown", event => moveByKey(event, i));
    keyring.append(made);
  }
  stage.keys.forEach((place, i) => {
    const [x, y, near] = onScreen(place), word = wordOf(i), size = 0.05 + 0.13 * Math.sqrt(stage.weights[i]), away = Math.hypot(x, y) || 1;
    const one = keyring.children[i], [circle, text, title] = one.children, wanted = stage.wanted.includes(i);
    describe(one, {class: `key${wanted ? " wanted" : ""}${movable() ? " loose" : ""}`, opacity: near < 0 ? 0.45 : 1});
    describe(circle, {cx: x, cy: y, r: size});
    // A number stands outside its key, a word above or below: there it has room to both sides.
    const aside = word ? [Math.max(-1.1, Math.min(1.1, x)), y + (y < 0.01 ? -size - 0.05 : size + 0.12)]
      : [x + (x || 0.01) / away * (size + 0.11), y + y / away * (size + 0.11) + 0.035];
    describe(text, {x: aside[0], y: aside[1], class: word && "word"});
    text.textContent = `${i} ${few(word)}`.trim();
    title.textContent = word;
    if (!movable()) { ["tabindex", "role", "aria-label", "aria-valuenow", "aria-valuetext"].forEach(name => one.removeAttribute(name)); return; }
    describe(one, {tabindex: 0, role: "slider", "aria-label": `K${key(i).slice(1)}${wanted ? ", to be read" : ""}: ${keyboard}`, "aria-valuenow": rounded(place[0]),
      "aria-valuemin": -stage.edge, "aria-valuemax": stage.edge, "aria-valuetext": `at ${place.map(part => brief(rounded(part))).join(", ")}; weight ${brief(stage.weights[i])}`});
  });
}

// ---- moves

const rounded = x => Math.round(x * 100) / 100;
const within = (x, low, high, parts) => Math.round(Math.max(low, Math.min(high, x)) * parts) / parts;

/** What the address says of a query; one that is moved by hand keeps still when keys move. */
const bearings = ([x, y, z = 0]) => ({angle: fine(degrees(Math.atan2(y, x))), rise: fine(degrees(Math.atan2(z, Math.hypot(x, y)))),
  length: fine(Math.min(stage.longest, Math.hypot(x, y, z)))});
const fine = x => Number(x.toPrecision(6));
const settings = query => { const {rise, ...rest} = bearings(query); return query.length === 3 ? {...rest, rise} : rest; };

/** The keys that were moved, by key and by how many numbers their place has, as the address says them. */
function placed(i, place) {
  const words = new Map(value("keys").split("*").filter(Boolean).map(word => [`${parseInt(word)} ${word.split("_").length}`, word]));
  const name = `${i} ${stage.keys[i].length + 1}`;
  if (place) words.set(name, [i, ...place].join("_")); else words.delete(name);
  return [...words.values()].join("*");
}

function moveKey(i, place) {
  const there = place.map(x => within(x, -stage.edge, stage.edge, 100) || 0), keys = stage.keys.with(i, there);
  draft({...stage, keys, values: keys}, {keys: placed(i, there), ...settings(stage.queries[0])});
}

function moveQuery(query) {
  const axis = tie(stage.keys, stage.wanted), along = axis ? dot(query, axis) : 0;
  // Two keys score alike on a line, which no hand would meet.
  if (axis && Math.abs(along) < 0.06 * Math.hypot(...query)) query = minus(query, times(axis, along));
  draft({...stage, queries: [query], handle: {...stage.handle, at: query}}, settings(query));
}

function moveScale(x) {
  const {along} = stage.handle, scale = within(x, -1, 2, 100), keys = stage.keys.with(0, times(along, scale));
  draft({...stage, keys, handle: {...stage.handle, at: keys[0]}}, {x: scale});
}

function moveToken(angle) {
  const turn = angle * Math.PI / 180;
  draft(routed(stage, [Math.cos(turn), Math.sin(turn)]), {angle});
}

const asVector = ({angle, rise = 0, length}) => {
  const [a, b] = [angle, rise].map(x => x * Math.PI / 180), flat = Math.cos(b) * length;
  return stage.keys[0].length === 3 ? [flat * Math.cos(a), flat * Math.sin(a), Math.sin(b) * length] : [length * Math.cos(a), length * Math.sin(a)];
};

// ---- by pointer

let held = null; // how to move what is held, and how far beside its middle it was taken

const pointAt = event => {
  const {x, y} = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
  return [x, y];
};

/** The key under the pointer, unless the handle is nearer. */
function keyAt([x, y], reach) {
  if (!movable()) return null;
  const far = point => { const [a, b] = onScreen(point); return Math.hypot(a - x, b - y); };
  const nearest = stage.keys.reduce((best, key, i) => far(key) < far(stage.keys[best]) ? i : best, 0);
  const size = 0.05 + 0.13 * Math.sqrt(stage.weights[nearest]);
  return far(stage.keys[nearest]) < Math.max(size, reach) && far(drawn(stage.handle)) > 0.09 ? nearest : null;
}

function queryAt([x, y]) {
  const {kind, along} = stage.handle;
  if (kind === "sphere") {
    const length = Math.hypot(...stage.queries[0]), long = length / stage.unit || 1, {angle, rise} = onSphere(x / long, y / long);
    return moveQuery(asVector({angle, rise, length}));
  }
  if (kind === "ray") {
    const [ax, ay] = onScreen(along);
    return moveScale((x * ax + y * ay) / (ax * ax + ay * ay));
  }
  const angle = within(degrees(Math.atan2(-y, x)), -180, 180, 10);
  return kind === "ring" ? moveToken(angle) : moveQuery(asVector({angle, length: within(Math.hypot(x, y) * stage.unit, 0, stage.longest, 100)}));
}

svg.addEventListener("pointerdown", event => {
  if (!stage) return;
  event.preventDefault();
  svg.setPointerCapture(event.pointerId);
  hold(true);
  const point = pointAt(event), i = keyAt(point, event.pointerType === "touch" ? 0.14 : 0.09);
  if (i === null) {
    handle.focus({preventScroll: true});
    held = queryAt;
    queryAt(point);
    return;
  }
  keyring.children[i].focus({preventScroll: true});
  const first = stage.keys[i], [x, y] = point;
  held = ([a, b]) => moveKey(i, moved(first, a - x, y - b));
});
svg.addEventListener("pointermove", event => { if (svg.hasPointerCapture(event.pointerId)) held(pointAt(event)); });

// ---- by keys

const arrows = event => [{ArrowRight: 1, ArrowLeft: -1}[event.key] ?? 0, {ArrowUp: 1, ArrowDown: -1}[event.key] ?? 0,
  {PageUp: 1, PageDown: -1}[event.key] ?? 0];

function moveByKey(event, i) {
  const steps = arrows(event), far = event.shiftKey ? 0.1 : 0.02;
  if (!movable() || (!steps.some(Boolean) && event.key !== "Home")) return;
  event.preventDefault();
  if (event.key === "Home") move({keys: placed(i, null) || null});
  else moveKey(i, moved(stage.keys[i], ...steps.map(step => step * far)));
}

handle.addEventListener("keydown", event => {
  const [right, up] = arrows(event), far = event.shiftKey ? 5 : 1, {kind} = stage.handle;
  if (!right && !up && event.key !== "Home") return;
  event.preventDefault();
  if (event.key === "Home") move(kind === "ray" ? {x: 1} : {angle: null, rise: null, length: null});
  else if (kind === "ray") moveScale(value("x") + (up + right) * far * 0.05);
  else if (kind === "ring") { if (right) moveToken(turnedBy(value("angle"), -right * far * 2)); }
  else {
    const now = bearings(stage.queries[0]);
    if (right) now.angle = turnedBy(now.angle, -right * far * 2);
    else if (kind === "sphere") now.rise = within(now.rise + up * far * 2, -90, 90, 10);
    else now.length = within(now.length + up * far * 0.5, 0, stage.longest, 10);
    moveQuery(asVector(now));
  }
});
const turnedBy = (angle, by) => fine((angle + by + 540) % 360 - 180);

document.getElementById("find").addEventListener("click", () => move({angle: null, rise: null, length: null}));
document.getElementById("replace").addEventListener("click", () => move({keys: null}));

// ---- what to expect of the verdict, in the words of explorer.txt

function expected() {
  const {wanted, weights, eps, eta, show: scene} = stage, three = x => String(Number(x.toPrecision(3)));
  const said = (holds, says, kept = "kept", broken = "not kept") => ({tone: holds ? "proved" : "refuted", word: holds ? kept : broken, says});
  if (!possible) return said(false, wanted.length === 1 ? `Key ${wanted[0]} lies in the hull of the other keys: no query reads it alone.`
    : `The line through keys ${wanted.join(" and ")} meets the hull of the others: no query reads just these two alike.`, "", "impossible");
  if (scene === "noise") {
    const far = weights.reduce((sum, weight, i) => sum + Math.abs(weight - (i < 2 ? 0.5 : 0)), 0);
    return said(far <= eta, `This draw is off by ${three(far)}; ${eta} is allowed.`, "near the average", "off the average");
  }
  if (scene === "route") return said(off(stage) <= eps, `The token should read key ${wanted[0]}, and is off by ${three(off(stage))}; ${eps} is allowed.`);
  const least = three(1 / (wanted.length + eps)), given = wanted.map(i => three(weights[i]));
  return said(keeps(stage.keys, wanted, stage.queries[0], eps), wanted.length === 1
    ? `Key ${wanted[0]} gets ${given[0]} of the weight, and ${least} is asked.`
    : `Keys ${wanted.join(" and ")} get ${given.join(" and ")}, and ${least} each is asked.`);
}
