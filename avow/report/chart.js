// Charts as SVG, from the plain descriptions that avow/report/charts.py writes: lines, points, bars, and maps of cells.
// Colours are the page's custom properties, so that light, dark and paper need no redrawing. Nothing is imported: the lab
// loads this file as a module, and a report has it in line.

// In pixels: letters, letters beside points, how far the pointer finds a point, what no screen shows.
const FONT = 13, SMALL = 11, NEAR = 40, LOOSE = 1e5;
const DASHES = ["", "8 5", "2 3", "8 4 2 4", "14 5"];
const PAGE = {ink: "var(--ink)", soft: "var(--soft)", line: "var(--line)", page: "var(--page)"};
const FILE = {ink: "#1c2128", soft: "#59636e", line: "#d8dde3", page: "#ffffff"};
// From low to high, seen on white and on black.
const SHADES = ["#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"];

/** Draw a figure in an element, or draw it again with other numbers: the focus and hidden series stay. */
export function draw(element, figure) {
  const known = states.get(element), state = known && element.contains(known.svg) ? known : mounted(element);
  const drawn = JSON.stringify(figure);
  if (drawn === state.drawn) return;
  Object.assign(state, {figure, drawn});
  // A legend of another number of lines leaves the picture another height; the observer says of all other changes.
  if (writeKeys(state)) Object.assign(state, measured(state.svg));
  paint(state);
}

/** Where values stand in a drawn figure: `x.at(value)` and `y.at(value)` in pixels of its svg, `x.back(pixel)` as values. */
export const frame = element => states.get(element)?.frame;

/** A figure as a document of its own, in the colours of white paper, with its title and its legend. */
export function svgText(figure, width = 900, height = 520) {
  const entries = legend(figure), rows = [[]];
  let across = 12;
  for (const entry of entries) {
    const wide = 34 + widthOf(entry.name);
    if (across + wide > width && rows.at(-1).length) { rows.push([]); across = 12; }
    rows.at(-1).push({...entry, x: across});
    across += wide;
  }
  const above = (figure.title ? 26 : 6) + (entries.length ? rows.length * 20 : 0);
  const title = fitting(figure.title ?? "", 0.8 * width), heading = text(title, 12, 22, FILE.ink, 'font-weight="650" font-size="15"');
  const keys = rows.flatMap((row, i) => row.map(({x, name, trace}) => {
    const y = above - 20 * (rows.length - i) + 14;
    return `<g transform="translate(${x} ${y - 10})">${sample(trace, FILE)}</g>${text(name, x + 28, y, FILE.ink)}`;
  })).join("");
  const {body} = composed(figure, width, height - above, FILE, new Set());
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" ` +
    `font-family="system-ui, sans-serif" font-size="${FONT}"><title>${escaped(nameOf(figure))}</title>` +
    `<rect width="100%" height="100%" fill="${FILE.page}"/>${heading}${keys}<g transform="translate(0 ${above})">${body}</g></svg>`;
}

/** Save what an element shows as an SVG file of this name; hidden series are not in it. */
export function savePicture(element, name) {
  const {figure, hidden} = states.get(element), traces = figure.traces?.filter(trace => !hidden.has(trace.name));
  const url = URL.createObjectURL(new Blob([svgText({...figure, traces})], {type: "image/svg+xml"}));
  Object.assign(document.createElement("a"), {href: url, download: `${name}.svg`}).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

// ---- in a page

const states = new WeakMap();
const sizes = new ResizeObserver(all => all.forEach(({target, contentRect: {width, height}}) => {
  const state = states.get(target.parentElement);
  if (state && (state.width !== width || state.height !== height)) paint(Object.assign(state, {width, height}));
}));
// Paper is measured before the observer can tell.
for (const moment of ["beforeprint", "afterprint"]) addEventListener(moment, () => {
  for (const element of document.querySelectorAll(".figure")) {
    const state = states.get(element);
    if (state) paint(Object.assign(state, measured(state.svg)));
  }
});

function measured(svg) {
  const {width, height} = svg.getBoundingClientRect();
  return {width, height};
}

function mounted(element) {
  const id = element.id || `figure-${Math.random().toString(36).slice(2)}`;
  element.innerHTML = `<div class="keys" role="group" aria-label="Series"></div><svg role="application" tabindex="0"
    aria-roledescription="chart" aria-describedby="${id}-about" font-size="${FONT}"><g aria-hidden="true"></g></svg>
    <p class="about" id="${id}-about"></p><output class="tip" hidden></output>`;
  const [keys, svg, about, tip] = element.children;
  const state = {keys, svg, about, tip, hidden: new Set(), spots: [], listed: "", at: null};
  const point = event => {
    const {left, top} = svg.getBoundingClientRect();
    show(state, nearest(state.spots, event.clientX - left, event.clientY - top));
  };
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  // What a finger has found stays until the next tap.
  svg.addEventListener("pointerleave", event => { if (event.pointerType !== "touch") show(state, null); });
  svg.addEventListener("blur", () => show(state, null));
  svg.addEventListener("keydown", event => {
    if (event.key === "Escape") show(state, null);
    const step = {ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1]}[event.key];
    if (!step || !state.spots.length) return;
    event.preventDefault();
    show(state, next(state.spots, state.at, ...step));
  });
  keys.addEventListener("click", event => {
    const name = event.target.closest("button")?.dataset.series;
    if (name === undefined) return;
    if (!state.hidden.delete(name)) state.hidden.add(name);
    event.target.closest("button").setAttribute("aria-pressed", !state.hidden.has(name));
    paint(state);
  });
  states.set(element, state);
  sizes.observe(svg);
  return state;
}

function writeKeys(state) {
  const entries = legend(state.figure), looks = entries.map(({trace}) => ({...trace, x: 0, y: 0, hover: 0}));
  const listed = JSON.stringify(looks);
  if (listed === state.listed) return false;
  state.listed = listed;
  state.keys.hidden = !entries.length;
  state.keys.innerHTML = entries.map(({name, trace}) => {
    const drawn = `<svg width="24" height="12" aria-hidden="true">${sample(trace, PAGE)}</svg>${escaped(name)}`;
    return `<button type="button" data-series="${escaped(name)}" aria-pressed="${!state.hidden.has(name)}">${drawn}</button>`;
  }).join("");
  return true;
}

function paint(state) {
  const {svg, figure, width, height} = state;
  if (!figure || !(width > 0) || !(height > 0)) return; // it is drawn as soon as there is room for it
  const since = performance.now(), {body, spots, frame} = composed(figure, width, height, PAGE, state.hidden);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("aria-label", nameOf(figure));
  svg.firstElementChild.innerHTML = body;
  state.about.textContent = alternative(figure);
  Object.assign(state, {spots, frame});
  show(state, state.at && spots.find(({series, i}) => series === state.at.series && i === state.at.i));
  performance.measure("avow:figure", {start: since});
}

/** Say what stands at a spot, and mark it; without one, neither. */
function show(state, spot) {
  const {svg, tip} = state;
  state.at = spot ?? null;
  svg.querySelector(".here")?.remove();
  tip.hidden = !spot;
  if (!spot) return;
  const around = spot.box ?? [spot.x - spot.r, spot.y - spot.r, 2 * spot.r, 2 * spot.r];
  svg.firstElementChild.insertAdjacentHTML("beforeend",
    rect(around, `class="here" rx="${spot.box ? 2 : spot.r}" fill="none" stroke="${PAGE.ink}" stroke-width="1.5"`));
  tip.textContent = spot.says();
  tip.classList.toggle("titled", tip.textContent.includes("\n"));
  const left = spot.x + 14 + tip.offsetWidth > state.width;
  tip.style.left = `${Math.max(0, left ? spot.x - 14 - tip.offsetWidth : spot.x + 14)}px`;
  tip.style.top = `${Math.max(0, state.keys.offsetHeight + spot.y - tip.offsetHeight / 2)}px`;
}

function nearest(spots, x, y) {
  const inside = ([left, top, width, height]) => x >= left && x <= left + width && y >= top && y <= top + height;
  let best = null, least = NEAR;
  for (const spot of spots) {
    const far = !spot.box ? Math.hypot(spot.x - x, spot.y - y) : inside(spot.box) ? 0 : Infinity;
    if (far < least) [best, least] = [spot, far];
  }
  return best;
}

/** The next point of the series, or the nearest one of the next series; the first where none was shown. */
function next(spots, at, along, across) {
  if (!at) return spots[0];
  const own = spots.filter(({series}) => series === at.series);
  if (along) return own[own.findIndex(({i}) => i === at.i) + along] ?? at;
  const all = [...new Set(spots.map(({series}) => series))], series = all[all.indexOf(at.series) + across];
  const there = spots.filter(spot => spot.series === series);
  return there.reduce((best, spot) => Math.abs(spot.x - at.x) < Math.abs(best.x - at.x) ? spot : best, there[0]) ?? at;
}

// ---- words

const ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"};
const escaped = words => String(words).replace(/[&<>"]/g, mark => ENTITIES[mark]);
const raised = number => String(number).replace(/[-\d]/g, mark => "⁰¹²³⁴⁵⁶⁷⁸⁹"[mark] ?? "⁻");

/** A number as a reader wants it: few digits, thousands apart, powers of ten where it is very small or large. */
function plain(number, digits = 6) {
  const size = Math.abs(number);
  if (size === 0 || (size >= 1e-3 && size < 1e6)) {
    return number.toLocaleString("en", {maximumSignificantDigits: digits}).replace("-", "−");
  }
  const [front, power] = number.toExponential(Math.min(digits, 3) - 1).split("e");
  const factor = Number(front) === 1 ? "" : `${Number(front)}×`.replace("-", "−");
  return `${factor}10${raised(Number(power))}`;
}

function written(axis, value, digits) {
  if (typeof value === "string") return value;
  return axis.format === "%" ? `${plain(100 * value, digits)}%` : plain(value, digits) + (axis.format ?? "");
}

/** What is said of a point: its own words, or where it stands. */
const tooltip = ({x, y}, trace, i) => trace.hover?.[i] ?? [trace.name, `${x.title} ${written(x, trace.x[i], 3)}`,
  `${y.title} ${written(y, trace.y[i], 3)}`].filter(Boolean).join("\n");

const nameOf = ({title, x, y}) => title || [y.title, x.title].filter(Boolean).join(" against ") || "Figure";

/** What a figure shows, for those who do not see it. */
function alternative({traces, cells, x, y}) {
  if (cells) return `A map of ${cells[0]?.length ?? 0} by ${cells.length} squares. Arrow keys read them.`;
  const span = (axis, values) => {
    const there = values.filter(value => value !== null);
    if (axis.names || there.length < 2) return there.map(value => written(axis, value, 3)).join(", ");
    return `${written(axis, least(there), 3)} to ${written(axis, most(there), 3)}`;
  };
  const said = traces.filter(trace => trace.hover !== null && trace.x.length).map(trace => {
    const spans = `${x.title || "x"} ${span(x, trace.x)}, ${y.title || "y"} ${span(y, trace.y)}`;
    return trace.name ? `${trace.name}: ${spans}` : spans;
  });
  return `${said.join("; ")}. Arrow keys read its points.`;
}

const least = values => values.reduce((a, b) => b < a ? b : a), most = values => values.reduce((a, b) => b > a ? b : a);

let pen = null;
function widthOf(words, size = FONT) {
  pen ??= document.createElement("canvas").getContext("2d");
  pen.font = `${size}px system-ui, sans-serif`;
  return pen.measureText(words).width;
}

/** Words that fit into so many pixels. */
function fitting(words, room) {
  if (widthOf(words) <= room) return words;
  let kept = words.length;
  while (kept > 1 && widthOf(`${words.slice(0, kept)}…`) > room) kept--;
  return `${words.slice(0, kept)}…`;
}

const text = (words, x, y, colour, more = "") =>
  `<text x="${near(x)}" y="${near(y)}" fill="${colour}" ${more}>${escaped(words)}</text>`;
const rect = ([x, y, width, height], more) =>
  `<rect x="${near(x)}" y="${near(y)}" width="${near(width)}" height="${near(height)}" ${more}/>`;
const near = pixel => Math.round(10 * Math.max(-LOOSE, Math.min(LOOSE, pixel))) / 10;

/** A label in which powers stand above their ten, larger than Unicode has them. */
const powers = markup => markup.replace(/10([⁻⁰¹²³⁴-⁹]+)/g, (_, power) => `10<tspan dy="-.45em" font-size=".78em">` +
  `${power.replace(/./g, one => "−0123456789"["⁻⁰¹²³⁴⁵⁶⁷⁸⁹".indexOf(one)])}</tspan>`);

// ---- axes

/** The values that an axis holds: its own range, or what the numbers span and a little room. */
function rangeOf(axis, values, bars) {
  if (axis.range) return axis.range;
  const there = values.filter(value => Number.isFinite(value) && (!axis.log || value > 0));
  if (bars) there.push(0);
  if (!there.length) return axis.log ? [0.1, 10] : [0, 1];
  const go = axis.log ? Math.log10 : Number, back = axis.log ? x => 10 ** x : Number;
  const [low, high] = [go(least(there)), go(most(there))];
  const room = high > low ? 0.05 * (high - low) : axis.log ? 0.3 : Math.abs(high) / 2 || 1;
  return [bars && low === 0 ? 0 : back(low - room), bars && high === 0 ? 0 : back(high + room)];
}

/** Ticks of an axis that has room for so many: values and their labels. */
function ticksOf(axis, [low, high], fit) {
  const within = value => value >= low - 1e-9 * (high - low) && value <= high + 1e-9 * (high - low);
  if (axis.ticks) {
    return axis.ticks.map((tick, i) => [tick, axis.labels?.[i] ?? written(axis, tick)]).filter(([tick]) => within(tick));
  }
  const few = Math.max(2, fit);
  if (axis.log) {
    const [first, last] = [Math.log10(low), Math.log10(high)];
    if (axis.every || (last - first >= 2 && !(axis.format === "×" && 3 * (last - first) <= few))) {
      const every = axis.every ?? Math.max(1, Math.ceil((last - first) / few)), powers = [];
      for (let k = Math.ceil(first / every - 1e-9); k * every <= last + 1e-9; k++) powers.push(k * every);
      const short = axis.format || powers.every(power => power >= -3 && power <= 4);
      const label = power => short || power === 0 || power === 1 ? written(axis, 10 ** power) : `10${raised(power)}`;
      return powers.map(power => [10 ** power, label(power)]);
    }
    const decades = Array.from({length: Math.ceil(last - first) + 1}, (_, k) => Math.floor(first) + k);
    const found = decades.flatMap(power => [1, 2, 5].map(digit => Number(`${digit}e${power}`))).filter(within);
    if (found.length > 1) return found.map(tick => [tick, written(axis, tick)]);
  }
  const raw = (high - low) / few, power = 10 ** Math.floor(Math.log10(raw));
  const every = axis.every ?? power * [1, 2, 5, 10].find(step => step * power >= raw * (1 - 1e-9)), found = [];
  for (let k = Math.ceil(low / every - 1e-9); within(k * every); k++) found.push(k * every || 0); // not −0
  return found.map(tick => [tick, written(axis, tick)]);
}

/** An axis between two pixels: where a value stands, which value stands there, and its ticks. */
function scaleOf(axis, values, from, to, size, bars) {
  if (axis.names) {
    const band = (to - from) / Math.max(axis.names.length, 1);
    const places = new Map(axis.names.map((name, i) => [name, from + (i + 0.5) * band]));
    const every = [1, 2, 5, 10, 20, 50, 100, 1000].find(step => step * band >= size(axis.names)) ?? 1000;
    const ticks = axis.names.filter((_, i) => i % every === 0).map(name => [name, name]);
    return {at: name => places.get(name), ticks, band};
  }
  const [low, high] = rangeOf(axis, values, bars), go = axis.log ? Math.log10 : Number;
  const start = go(low), reach = go(high) - start, ratio = (to - from) / reach;
  const fit = Math.abs(to - from) / size(ticksOf(axis, [low, high], 6).map(([, label]) => label));
  return {ticks: ticksOf(axis, [low, high], Math.floor(fit)), at: value => from + (go(value) - start) * ratio,
    back: pixel => { const there = start + (pixel - from) / ratio; return axis.log ? 10 ** there : there; }};
}

// ---- the picture

/** A figure's markup, the spots where something can be said, and its frame. */
function composed(figure, width, height, ink, hidden) {
  const {x, y, cells, upright, levels = []} = figure, traces = (figure.traces ?? []).filter(({name}) => !hidden.has(name));
  const bars = traces.filter(({mode}) => mode === "bars"), lying = bars.length > 0 && !!y.names;
  const top = 8, bottom = height - (x.title ? 2.9 : 1.6) * FONT - 6;
  const xs = traces.flatMap(trace => [...trace.x, ...(trace.intervals ?? []).flat()]), ys = traces.flatMap(trace => trace.y);
  const [from, to, tall] = y.names ? [top, bottom, FONT + 3] : [bottom, top, 30]; // names go down, numbers up
  const down = scaleOf(y, ys, from, to, () => tall, bars.length && !lying);
  const longest = Math.min(Math.max(0, ...down.ticks.map(([, label]) => widthOf(label))), 0.45 * width);
  const left = longest + 10 + (y.title ? 1.5 * FONT : 0), right = width - (cells ? 29 + barWidth(figure) : 14);
  const wide = labels => Math.max(56, ...labels.map(label => widthOf(label) + 14));
  const across = scaleOf(x, xs, left, right, wide, lying);
  const sheet = {left, right, top, bottom, x: across, y: down}, spots = [];
  const inside = cells ? map(figure, sheet, spots) : traces.map((trace, i) =>
    trace.mode === "bars" ? barsOf(trace, bars.indexOf(trace), bars.length, lying, sheet, figure, spots, i)
      : series(trace, traces[i - 1], sheet, ink, figure, spots, i)).join("");
  const upward = at => `M${near(across.at(at))} ${top}V${near(bottom)}`;
  const level = at => `M${near(left)} ${near(down.at(at))}H${near(right)}`;
  const grid = [...(x.names ? [] : across.ticks.map(([tick]) => upward(tick))),
    ...(y.names ? [] : down.ticks.map(([tick]) => level(tick)))];
  const dotted = [...(upright === undefined ? [] : [upward(upright)]), ...levels.map(({at}) => level(at))];
  // Above the level that they speak of, where there is room: curves come from below.
  const beyond = at => down.at(at) - top > FONT + 1 ? down.at(at) - 3 : down.at(at) + FONT + 1;
  const words = levels.map(level => text(level.text, left + 4, beyond(level.at), ink.soft)).join("");
  // A picture within the picture: what lies outside of the axes is cut off.
  const [a, b, w, h] = [left, top, right - left, bottom - top].map(near), part = `viewBox="${a} ${b} ${w} ${h}"`;
  const body = `<path d="${grid.join("")}" stroke="${ink.line}" fill="none"/>
    ${labelled(figure, sheet, longest, height, width, ink)}
    <svg x="${a}" y="${b}" width="${w}" height="${h}" ${part} preserveAspectRatio="none">${inside}
    <path d="${dotted.join("")}" stroke="${ink.soft}" stroke-dasharray="1.5 3" fill="none"/>${words}${beside(spots, sheet, ink)}
    </svg>${cells ? colourBar(figure, sheet, ink) : ""}`;
  return {body, spots, frame: sheet};
}

function labelled({x, y}, {left, right, top, bottom, ...at}, longest, height, width, ink) {
  const parts = [], put = (words, x, y, colour, more) => parts.push(powers(text(words, x, y, colour, more)));
  let free = -LOOSE;
  for (const [tick, label] of at.x.ticks) {
    const half = widthOf(label) / 2, middle = Math.min(at.x.at(tick), width - half - 1);
    if (middle - half < free + 6) continue;
    free = middle + half;
    put(label, middle, bottom + 1.3 * FONT, ink.ink, 'class="tick x" text-anchor="middle"');
  }
  for (const [tick, label] of at.y.ticks) {
    put(fitting(label, longest + 1), left - 6, at.y.at(tick) + 0.35 * FONT, ink.ink, 'class="tick y" text-anchor="end"');
  }
  const title = fitting(x.title ?? "", width - 4), half = widthOf(title) / 2, middle = near((top + bottom) / 2);
  const centre = Math.max(half, Math.min((left + right) / 2, width - half));
  if (title) put(title, centre, height - 0.4 * FONT, ink.soft, 'class="axis x" text-anchor="middle"');
  const turned = `class="axis y" text-anchor="middle" transform="rotate(-90 ${FONT} ${middle})"`;
  if (y.title) put(fitting(y.title, bottom), FONT, middle, ink.soft, turned);
  return parts.join("");
}

/** Labels of points: right, left, above or below, wherever nothing stands yet; where all is taken, the tip has to do. */
function beside(spots, {left, right, top, bottom}, ink) {
  const taken = spots.filter(({r}) => r).map(({x, y, r}) => [x - r, y - r, x + r, y + r]), parts = [];
  for (const {x, y, r, label} of spots) {
    if (!label) continue;
    const wide = widthOf(label, SMALL), middle = x - wide / 2;
    const free = [[x + r, y - 6], [x - r - wide, y - 6], [middle, y - r - 12], [middle, y + r]]
      .map(([a, b]) => [a, b, a + wide, b + 12])
      .find(([a, b, c, d]) => a >= left && c <= right && b >= top && d <= bottom &&
        !taken.some(other => a < other[2] && other[0] < c && b < other[3] && other[1] < d));
    if (!free) continue;
    taken.push(free);
    const halo = `paint-order="stroke" stroke="${ink.page}" stroke-width="3"`;
    parts.push(text(label, free[0], free[1] + 10, ink.soft, `class="label" font-size="${SMALL}" ${halo}`));
  }
  return parts.join("");
}

/** One series of lines or points. */
function series(trace, before, {x, y, left, right}, ink, figure, spots, index) {
  const place = (one, other) => one === null || other === null ? null : [near(x.at(one)), near(y.at(other))];
  const places = ({x: xs, y: ys}) => xs.map((one, i) => place(one, ys[i]));
  const points = places(trace), {mode, colour, width = 2, opacity = 1} = trace, parts = [];
  const lines = ["line", "line and points", "steps"].includes(mode);
  if (trace.fill && before) {
    const back = places(before).filter(Boolean).reverse(), there = points.filter(Boolean);
    if (there.length) parts.push(`<path d="M${[...there, ...back].join("L")}Z" fill="${colour}" fill-opacity=".12"/>`);
  }
  if (lines) {
    parts.push(`<path class="line" d="${bent(points, mode === "steps")}" fill="none" stroke="${colour}" stroke-width="${width}"
      stroke-opacity="${opacity}" stroke-dasharray="${DASHES[(trace.dash ?? 0) % DASHES.length]}" stroke-linejoin="round"/>`);
  }
  const size = i => (Array.isArray(trace.size) ? trace.size[i] : trace.size ?? 8) / 2;
  if (mode !== "line" && mode !== "steps") {
    const symbol = mode === "crosses" ? "x" : trace.symbol, look = painted(mode, colour, ink);
    const marks = points.map((point, i) => point && mark(symbol, ...point, size(i))).filter(Boolean);
    // What is translucent is drawn one by one: where marks lie on each other, it is darker.
    const shapes = opacity < 1 ? marks : [marks.join("")];
    parts.push(...shapes.map(d => `<path class="points" d="${d}" ${look} opacity="${opacity}"/>`));
  }
  if (trace.hover !== null) points.forEach((point, i) => {
    if (!point || point[0] < left - 1 || point[0] > right + 1) return;
    const says = () => tooltip(figure, trace, i);
    spots.push({x: point[0], y: point[1], r: size(i) + 3, series: index, i, says, label: trace.labels?.[i]});
  });
  return parts.join("");
}

function bent(points, steps) {
  let path = "", open = false;
  for (const point of points) {
    if (point) path += !open ? `M${point[0]} ${point[1]}` : steps ? `H${point[0]}V${point[1]}` : `L${point[0]} ${point[1]}`;
    open = point !== null;
  }
  return path;
}

const painted = (mode, colour, ink) => mode === "open points" ? `fill="${ink.page}" stroke="${colour}" stroke-width="2"`
  : mode === "crosses" ? `fill="none" stroke="${colour}" stroke-width="2"` : `fill="${colour}"`;

/** The outline of a mark around a point. */
function mark(symbol, x, y, r) {
  const corners = (count, turn, reach = r) => `M${Array.from({length: count}, (_, k) => {
    const angle = turn + 2 * Math.PI * k / count;
    return [near(x + reach * Math.sin(angle)), near(y - reach * Math.cos(angle))];
  }).join("L")}Z`;
  const arm = near(2 * r / 3), rest = near(r - r / 3); // of a cross: how wide an arm is, how long
  return {
    square: () => corners(4, Math.PI / 4, r * 1.3), diamond: () => corners(4, 0, r * 1.3),
    "triangle-up": () => corners(3, 0, r * 1.2), "triangle-down": () => corners(3, Math.PI, r * 1.2),
    pentagon: () => corners(5, 0, r * 1.1), hexagon: () => corners(6, 0, r * 1.1),
    cross: () => `M${near(x - r)} ${near(y - arm / 2)}h${rest}v${-rest}h${arm}v${rest}h${rest}v${arm}h${-rest}v${rest}h${-arm}v${-rest}h${-rest}z`,
    x: () => `M${near(x - 0.8 * r)} ${near(y - 0.8 * r)}l${1.6 * r} ${1.6 * r}m0 ${-1.6 * r}l${-1.6 * r} ${1.6 * r}`,
  }[symbol]?.() ?? `M${near(x - r)} ${near(y)}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0z`;
}

/** Bars over names, those of several series side by side; or on their side, each over its own name, with whiskers. */
function barsOf(trace, place, count, lying, {x, y}, figure, spots, index) {
  const parts = [], whiskers = [];
  trace.x.forEach((one, i) => {
    if (one === null || trace.y[i] === null) return;
    const [name, value, band] = lying ? [trace.y[i], one, y] : [one, trace.y[i], x];
    const thick = 0.7 * band.band / (lying ? 1 : count);
    const start = band.at(name) - (lying ? thick / 2 : 0.35 * band.band - place * thick), scale = lying ? x : y;
    const [low, high] = [scale.at(0), scale.at(value)].sort((a, b) => a - b);
    const box = lying ? [low, start, high - low, thick] : [start, low, thick, high - low];
    parts.push(rect(box, `class="bar" fill="${trace.colour}" fill-opacity="${trace.opacity ?? 1}"`));
    if (trace.intervals) {
      const [from, to] = trace.intervals[i].map(end => near(x.at(end))), middle = near(start + thick / 2);
      whiskers.push(`M${from} ${middle - 5}v10m0 -5H${to}m0 -5v10`);
    }
    if (trace.hover === null) return;
    const [tip, side] = lying ? [x.at(value), start + thick / 2] : [start + thick / 2, low];
    spots.push({x: near(tip), y: near(side), box, series: index, i, says: () => tooltip(figure, trace, i)});
  });
  const lines = `<path class="whiskers" d="${whiskers.join("")}" stroke="${trace.whisker}" stroke-width="2" fill="none"/>`;
  return parts.join("") + (whiskers.length ? lines : "");
}

/** Rows of squares, each in the colour of its number. */
function map({cells, texts, colours, x: {names: columns}, y: {names: rows}}, {x, y}, spots) {
  const parts = [];
  cells.forEach((row, j) => row.forEach((value, i) => {
    if (value === null) return;
    const [middle, height] = [x.at(columns[i]), y.at(rows[j])];
    const box = [middle - x.band / 2 + 0.5, height - y.band / 2 + 0.5, Math.max(x.band - 1, 1), Math.max(y.band - 1, 1)];
    parts.push(rect(box, `class="cell" fill="${shade(colours, value)}"`));
    spots.push({x: near(middle), y: near(height), box, series: j, i, says: () => texts[j][i]});
  }));
  return parts.join("");
}

/** The colour of a number, between two of the shades. */
function shade({range: [low, high], reversed}, value) {
  const share = Math.max(0, Math.min(1, (value - low) / (high - low || 1))), last = SHADES.length - 1;
  const parts = i => [1, 3, 5].map(at => parseInt(SHADES[i].slice(at, at + 2), 16));
  const place = (reversed ? 1 - share : share) * last;
  const one = parts(Math.floor(place)), other = parts(Math.min(Math.floor(place) + 1, last));
  return `rgb(${one.map((part, k) => Math.round(part + (other[k] - part) * (place % 1))).join(" ")})`;
}

/** What stands beside the bar of colours, and where between 0 and 1. */
function barTicks({colours: {labels, range: [low, high], ticks, format}}) {
  return ticksOf({ticks, labels, format}, [low, high], 5).map(([tick, label]) => [(tick - low) / (high - low || 1), label]);
}

const barWidth = figure => Math.max(0, ...barTicks(figure).map(([, label]) => widthOf(label)));

function colourBar(figure, {right, top, bottom}, ink) {
  const {range: [low, high]} = figure.colours, count = 40, tall = (bottom - top) / count, parts = [];
  for (let k = 0; k < count; k++) {
    const colour = shade(figure.colours, low + (high - low) * (k + 0.5) / count);
    parts.push(rect([right + 12, bottom - (k + 1) * tall, 9, tall + 0.6], `fill="${colour}"`));
  }
  for (const [share, label] of barTicks(figure)) {
    parts.push(text(label, right + 25, bottom - share * (bottom - top) + 0.35 * FONT, ink.ink, 'class="tick"'));
  }
  return parts.join("");
}

// ---- legends

/** The series that a legend names, each once. */
function legend({traces = []}) {
  const named = new Map();
  for (const trace of traces) if (trace.legend && !named.has(trace.name)) named.set(trace.name, {name: trace.name, trace});
  return [...named.values()];
}

/** A small picture of a series, 24 by 12 pixels. */
function sample({mode, colour, symbol, dash = 0, width = 2, opacity = 1}, ink) {
  if (mode === "bars") return `<rect x="6" y="1" width="10" height="10" fill="${colour}" fill-opacity="${opacity}"/>`;
  const line = ["line", "line and points", "steps"].includes(mode) ? `<path d="M1 6H23" stroke="${colour}" stroke-width="${width}"
    stroke-opacity="${opacity}" stroke-dasharray="${DASHES[dash % DASHES.length]}"/>` : "";
  if (mode === "line" || mode === "steps") return line;
  return `${line}<path d="${mark(mode === "crosses" ? "x" : symbol, 12, 6, 4)}" ${painted(mode, colour, ink)}/>`;
}
