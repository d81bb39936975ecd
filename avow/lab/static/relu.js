// The ReLU builder: figures say most of it, and the network is drawn.
import {element, start, value} from "./lab.js";

const at = id => document.getElementById(id);
// More units than this in a layer are drawn as this many.
const MOST = 24, ACROSS = 90, TALL = 150;

let counted = ""; // what units were last counted of

start({
  preview({built}) {
    draw(built);
    at("growth").classList.toggle("stale", value("follow") === "a formula" && counted !== interval());
  },
  verdict({built}) {
    draw(built);
    counted = interval();
    at("growth").classList.remove("stale");
  },
});

const interval = () => JSON.stringify(["formula", "start", "end"].map(value));

let before = "";
function draw(built) {
  if (before === (before = built.join())) return;
  const layers = [1, ...built, 1], wide = ACROSS * (layers.length - 1) + 40;
  const svg = at("network"), scene = [];
  const places = layers.map((count, i) => {
    const shown = Math.min(count, MOST), step = TALL / Math.max(shown, 4);
    return [...Array(shown).keys()].map(k => [20 + i * ACROSS, TALL / 2 + (k - (shown - 1) / 2) * step]);
  });
  for (let i = 1; i < places.length; i++) for (const [x, y] of places[i]) for (const [from, high] of places[i - 1])
    scene.push(element("line", {x1: from, y1: high, x2: x, y2: y}));
  places.forEach((layer, i) => layer.forEach(([x, y]) => scene.push(element("circle",
    {cx: x, cy: y, r: Math.min(6, 0.42 * TALL / Math.max(layer.length, 4)), class: i && i < places.length - 1 ? "unit" : ""}))));
  svg.setAttribute("viewBox", `0 -8 ${wide} ${TALL + 16}`);
  svg.replaceChildren(...scene);
  const sizes = built.length > 6 ? `${built[0]}, ${built[1]} … ${built.at(-1)}` : built.join(", ");
  const drawn = Math.max(...built) > MOST ? `; ${MOST} of them drawn` : "";
  at("sizes").textContent = `${sizes} hidden unit${built.join() === "1" ? "" : "s"}${drawn}`;
  svg.setAttribute("aria-label", `A network with ${built.length} hidden layer${built.length > 1 ? "s" : ""}: ${built.join(", ")} units`);
}
