// The attention explorer: a stage with one thing to drag, and the weights as bars.
import {brief, element, hold, move, start, value} from "./lab.js";
import {degrees, drawStage, onScreen, onSphere} from "./stage.js";

const svg = document.getElementById("stage"), bars = document.getElementById("weights");
const handle = element("g", {class: "handle", tabindex: 0, role: "slider"},
  element("circle", {r: 0.2, class: "reach"}), element("circle", {r: 0.07, class: "knob"}));
svg.append(element("g", {class: "scene"}));
let stage = null;

start({preview(answer) {
  stage = answer.stage;
  drawStage(svg, stage);
  if (!handle.isConnected) svg.append(handle);
  place();
  bars.replaceChildren(...stage.weights.map((weight, i) => {
    const bar = element("span", {class: stage.wanted.includes(i) ? "wanted" : ""});
    bar.style.setProperty("--share", weight);
    return element("div", {}, bar, element("b", {}, String(i)), element("i", {}, weight.toFixed(weight < 0.01 ? 3 : 2)));
  }));
  bars.setAttribute("aria-label", "Weights: " + stage.weights.map((w, i) => `key ${i} ${w.toFixed(3)}`).join(", "));
}});

function place() {
  const {kind, name, at} = stage.handle, drawn = kind === "plane" || kind === "sphere" ? at.map(x => x / stage.unit) : at;
  const [x, y] = onScreen(drawn);
  handle.setAttribute("transform", `translate(${x} ${y})`);
  const now = kind === "ray" ? value("x") : value("angle");
  const words = kind === "ray" ? `scaled by ${brief(now)}` : kind === "ring" ? `at ${brief(now)} degrees` :
    `direction ${brief(now)} degrees, ${kind === "sphere" ? `height ${brief(value("rise"))} degrees, ` : ""}length ${brief(value("length"))}`;
  const [low, high] = kind === "ray" ? [-1, 2] : [-180, 180];
  for (const [key, word] of Object.entries({"aria-label": `The ${name}: drag it, or use the arrow keys`,
    "aria-valuenow": now, "aria-valuemin": low, "aria-valuemax": high, "aria-valuetext": words}))
    handle.setAttribute(key, word);
}

// ---- by pointer

function pointed(event) {
  const {x, y} = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
  const {kind, along} = stage.handle;
  if (kind === "sphere") {
    const long = value("length") / stage.unit || 1;
    return {...rounded(onSphere(x / long, y / long)), length: value("length")};
  }
  if (kind === "ray") {
    const [ax, ay] = onScreen(along);
    return {x: within((x * ax + y * ay) / (ax * ax + ay * ay), -1, 2, 100)};
  }
  const angle = within(degrees(Math.atan2(-y, x)), -180, 180, 10);
  return kind === "ring" ? {angle} : {angle, length: within(Math.hypot(x, y) * stage.unit, 0, 40, 100)};
}

const within = (x, low, high, parts) => Math.round(Math.max(low, Math.min(high, x)) * parts) / parts;
const rounded = angles => ({angle: within(angles.angle, -180, 180, 10), rise: within(angles.rise, -90, 90, 10)});

svg.addEventListener("pointerdown", event => {
  if (!stage) return;
  event.preventDefault();
  handle.focus({preventScroll: true});
  svg.setPointerCapture(event.pointerId);
  hold(true);
  move(pointed(event));
});
svg.addEventListener("pointermove", event => { if (svg.hasPointerCapture(event.pointerId)) move(pointed(event)); });

// ---- by keys

handle.addEventListener("keydown", event => {
  const across = {ArrowLeft: 1, ArrowRight: -1}[event.key] ?? 0, up = {ArrowUp: 1, ArrowDown: -1}[event.key] ?? 0;
  if (!across && !up && event.key !== "Home") return;
  event.preventDefault();
  const far = event.shiftKey ? 5 : 1, {kind} = stage.handle;
  if (event.key === "Home") move(kind === "ray" ? {x: 1} : {angle: null, rise: null, length: null});
  else if (kind === "ray") move({x: within(value("x") + (up - across) * far * 0.05, -1, 2, 100)});
  else if (across) move({angle: (value("angle") + across * far * 2 + 540) % 360 - 180});
  else if (kind === "sphere") move({rise: within(value("rise") + up * far * 2, -90, 90, 10)});
  else if (kind === "plane") move({length: within(value("length") + up * far * 0.5, 0, 40, 10)});
});
