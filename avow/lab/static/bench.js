// The bench: the shared script draws figures and facts; here are the knob on the axis and the tokens that were read.
import {frame} from "./chart.js";
import {brief, element, hold, move, start} from "./lab.js";

const at = id => document.getElementById(id);
const strip = at("strip"), canvas = at("tokens"), costs = at("costs"), axis = at("axis"), knob = at("knob"), figure = at("breaking");
const MARKS = {square: "■", diamond: "◆", "triangle-up": "▲", "triangle-down": "▼", pentagon: "⬟", hexagon: "⬢"};
let shown = null, range = null;

start({
  proving: "the same rows, against float64",
  preview(answer, fresh) {
    // A number stays in one line, with its exponent.
    at("sentence").replaceChildren(...answer.sentence.split(/(\S*\de-\d\S*)/)
      .map((part, i) => i % 2 ? element("span", {class: "number"}, part) : part));
    at("what").textContent = answer.about;
    if (fresh || !range || range.name !== answer.knob.name) range = answer.knob;
    requestAnimationFrame(place); // as soon as the figure is drawn
    shown = answer.strip;
    strip.hidden = !shown;
    costs.classList.add("stale"); // what stands there was found before this move
    if (shown) paint();
  },
  verdict({legend}) {
    at("methods").replaceChildren(...legend.map(({words, own_mechanism, colour, symbol}) => {
      const mark = element("b", {}, own_mechanism ? "×" : MARKS[symbol] ?? "●");
      mark.style.color = colour;
      return element("span", {}, mark, ` ${words}${own_mechanism ? ", another mechanism" : ""}`);
    }));
    costs.classList.remove("stale");
    at("facts").classList.add("sure"); // a warning's numbers are as sure as any
  },
});

// ---- the knob on the axis

new ResizeObserver(() => requestAnimationFrame(place)).observe(figure);
if ("static" in document.body.dataset) {
  knob.removeAttribute("tabindex");
  axis.ariaHidden = "true";
}
const titles = {norm: "Queries and keys stretched", rank: "Rank", drop: "Tolerance"};

/** Put the knob where the axis has its number. */
function place() {
  const drawn = frame(figure), svg = figure.querySelector("svg[role=application]");
  if (!drawn || !range) return;
  const own = svg.getBoundingClientRect(), outer = figure.parentElement.getBoundingClientRect();
  Object.assign(axis.style, {left: `${own.left - outer.left + drawn.left}px`, width: `${drawn.right - drawn.left}px`,
    top: `${own.top - outer.top + drawn.bottom}px`});
  axis.hidden = false;
  knob.style.left = `${drawn.x.at(range.at) - drawn.left}px`;
  knob.style.setProperty("--tall", `${drawn.bottom - drawn.top}px`);
  const words = {"aria-label": `${titles[range.name]}: drag along the axis, or use the arrow keys`, "aria-valuenow": range.at,
    "aria-valuemin": range.ends[0], "aria-valuemax": range.ends[1], "aria-valuetext": brief(range.at)};
  for (const [name, word] of Object.entries(words)) knob.setAttribute(name, word);
}

/** Set the number; the knob is there at once, the figure when the lab has answered. */
function put(number) {
  const [low, high] = range.ends, near = range.name === "rank" ? Math.round(number) : Number(number.toPrecision(3));
  range = {...range, at: Math.max(low, Math.min(high, near))};
  place();
  move({[range.name]: range.at});
}

const putAt = event => put(frame(figure).x.back(event.clientX - figure.querySelector("svg[role=application]").getBoundingClientRect().left));
axis.addEventListener("pointerdown", event => {
  event.preventDefault();
  axis.setPointerCapture(event.pointerId);
  knob.focus({preventScroll: true});
  hold(true);
  putAt(event);
});
axis.addEventListener("pointermove", event => { if (axis.hasPointerCapture(event.pointerId)) putAt(event); });
knob.addEventListener("keydown", event => {
  const way = {ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10}[event.key];
  const end = {Home: 0, End: 1}[event.key];
  if (way === undefined && end === undefined) return;
  event.preventDefault();
  const now = range.at, steps = way * (event.shiftKey ? 5 : 1);
  if (end !== undefined) put(range.ends[end]);
  else put(range.name === "rank" ? now + steps : now * 10 ** (steps / 40));
});

// ---- the tokens that were read

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => shown && paint());

function paint() {
  const {rows, tokens} = shown;
  Object.assign(canvas, {width: tokens, height: rows.length});
  const brush = canvas.getContext("2d"), lights = brush.createImageData(tokens, rows.length);
  brush.fillStyle = getComputedStyle(canvas).color; // which reads it as #rrggbb
  const colour = [1, 3, 5].map(i => parseInt(brush.fillStyle.slice(i, i + 2), 16));
  const tones = Array.from("0123456789", mark => [...colour, mark > 0 ? 255 * (0.25 + mark / 12) : 0]);
  [...rows.join("")].forEach((mark, i) => lights.data.set(tones[mark], 4 * i));
  brush.putImageData(lights, 0, 0);
  const read = rows.map(row => tokens - row.split("0").length + 1);
  const summary = `Of ${tokens} tokens, ${rows.length} queries read ${Math.min(...read)} to ${Math.max(...read)} each.`;
  document.getElementById("read").textContent = summary;
  canvas.setAttribute("aria-label", summary);
}
