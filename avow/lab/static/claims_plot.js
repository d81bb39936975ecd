// A small figure: lines, dots and one mark over a pair of axes, drawn again at every step of a search.
import {brief, element} from "./lab.js";

const HEIGHT = 210, LEFT = 56, RIGHT = 14, TOP = 14, BOTTOM = 34, LONGEST = 150;

/** Draw into an svg: `lines` of points, `dots`, and a `mark` with words; an axis is plain, in factors, or bent around 0. */
export function plot(svg, {name, x, y, lines, dots, mark}) {
  const width = svg.clientWidth || 600;
  const points = [...lines.flatMap(line => line.points), ...dots, ...(mark ? [mark.at] : [])];
  const across = scale(x, points.map(point => point[0]), LEFT, width - RIGHT);
  const up = scale(y, points.map(point => point[1]), HEIGHT - BOTTOM, TOP);
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  svg.setAttribute("aria-label", name);
  svg.replaceChildren(
    ...up.ticks.map(tick => element("g", {class: "tick"},
      element("line", {x1: LEFT, x2: width - RIGHT, y1: up.to(tick), y2: up.to(tick)}),
      element("text", {x: LEFT - 6, y: up.to(tick) + 4, "text-anchor": "end"}, brief(tick)))),
    ...across.ticks.map(tick => element("text", {x: across.to(tick), y: HEIGHT - BOTTOM + 16, "text-anchor": "middle"}, brief(tick))),
    element("text", {class: "title", x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 3, "text-anchor": "middle"}, x.title),
    element("text", {class: "title", x: LEFT, y: TOP - 3, "text-anchor": "start"}, y.title),
    ...(y.zero ? [element("line", {class: "zero", x1: LEFT, x2: width - RIGHT, y1: up.to(0), y2: up.to(0)})] : []),
    ...dots.map(([px, py]) => element("circle", {class: py > 0 ? "dot broken" : "dot", cx: across.to(px), cy: up.to(py), r: 2.2})),
    ...lines.map((line, i) => element("path", {class: `line line${i}`, d: path(line.points, across, up)})),
    ...(mark ? [marked(mark, across.to(mark.at[0]), up.to(mark.at[1]), width)] : []));
}

const path = (points, across, up) => points.map(([x, y], i) =>
  `${i ? "L" : "M"}${across.to(x).toFixed(1)} ${up.to(y).toFixed(1)}`).join("");

function marked({says, broken}, x, y, width) {
  const before = x > width - LONGEST - RIGHT, below = y < TOP + 18;
  return element("g", {class: broken ? "mark broken" : "mark"}, element("circle", {cx: x, cy: y, r: 6}),
    element("text", {x: x + (before ? -10 : 10), y: y + (below ? 18 : -8), "text-anchor": before ? "end" : "start"}, says));
}

/** Where a number stands between two pixels, and the numbers that are written beside the axis. */
function scale({low, high, log, bent}, numbers, from, to) {
  const least = low ?? Math.min(...numbers), most = high ?? Math.max(...numbers);
  if (bent) return around(numbers, from, to);
  const bend = log ? Math.log10 : Number, [a, b] = [bend(least), bend(most)];
  const span = b - a || 1;
  const ticks = log ? decades(a, b) : round(least, most);
  return {ticks, to: number => from + (to - from) * Math.min(1, Math.max(0, (bend(number) - a) / span))};
}

/** Two to five round numbers between two. */
const round = (least, most) => {
  const size = 10 ** Math.floor(Math.log10((most - least || 1) / 2));
  const step = [5, 2, 1].map(times => times * size).find(each => (most - least) / each >= 2) ?? size;
  const first = Math.ceil(least / step - 1e-9);
  return Array.from({length: Math.floor(most / step + 1e-9) - first + 1}, (_, i) => Number(((first + i) * step).toPrecision(12)));
};

const decades = (a, b) => {
  const all = Array.from({length: Math.max(1, Math.floor(b) - Math.ceil(a) + 1)}, (_, i) => 10 ** (Math.ceil(a) + i));
  const every = Math.ceil(all.length / 5);
  return all.filter((_, i) => i % every === 0);
};

/** Small numbers of either sign are spread out around 0, which is always on the axis. */
function around(numbers, from, to) {
  const size = Math.max(...numbers.map(Math.abs), 0) || 1, bend = number => Math.asinh(number / size * 300);
  const [a, b] = [Math.min(...numbers, -size / 20), Math.max(...numbers, size / 20)].map(bend);
  const ends = [Math.min(...numbers, 0), Math.max(...numbers, 0)].filter(end => Math.abs(end) > size / 100);
  return {ticks: [0, ...ends], to: number => from + (to - from) * (bend(number) - a) / (b - a)};
}
