// Figures that plotly has drawn, moved in place: while a slider moves, lines and marks follow their numbers, and what
// stands around them stays. Whatever else changes is plotly's to draw; so is what it reads out under the pointer.

const FAR = 1e5; // pixels; nothing so far away is seen

/** Remember what plotly has just drawn in a place; it is stale as soon as its numbers have moved since. */
export function remember(place, data, layout) {
  place.drawn = {layout: JSON.stringify(layout), looks: data.map(look), now: data, stale: false};
}

/** Move what is drawn to where these numbers are; false where plotly has to draw it again. */
export function followed(place, data, layout) {
  if (!place?.drawn) return false; // a page may make the place later
  const moved = follow(place, data, layout);
  place.drawn.stale ||= !moved;
  return moved;
}

function follow(place, data, layout) {
  const {drawn, _fullData: full, _fullLayout: frame} = place;
  if (drawn.looks.length !== data.length || drawn.layout !== JSON.stringify(layout)) return false;
  const steps = [];
  for (let i = 0; i < data.length; i++) {
    if (look(data[i]) !== drawn.looks[i]) return false;
    if (same(data[i].x, drawn.now[i].x) && same(data[i].y, drawn.now[i].y)) continue;
    const group = place.querySelector(`.scatterlayer .trace${full[i].uid}`);
    if (!group || !data[i].x.length || !straight(data[i]) || data[i + 1]?.fill === "tonexty") return false;
    const points = placed(data[i], frame), lines = group.querySelectorAll(".js-line"), marks = group.querySelectorAll(".point");
    if (data[i].mode.includes("lines") !== lines.length > 0 || data[i].mode.includes("markers") !== marks.length > 0) return false;
    steps.push(() => { bend(lines, points); put(marks, points); });
  }
  steps.forEach(step => step());
  Object.assign(drawn, {now: data, stale: drawn.stale || steps.length > 0});
  return true;
}

const look = trace => JSON.stringify({...trace, x: 0, y: 0});
const same = (a, b) => a === b || (a.length === b.length && a.every((one, i) => one === b[i]));
const straight = trace => trace.type === "scatter" && !trace.fill && !trace.text && !trace.line?.shape;

/** Where points stand in the figure, in pixels; null where there is none. */
function placed({x, y}, {xaxis, yaxis}) {
  const near = pixel => Math.round(10 * Math.max(-FAR, Math.min(FAR, pixel))) / 10;
  return x.map((one, i) => one === null || y[i] === null ? null : [near(xaxis.d2p(one)), near(yaxis.d2p(y[i]))]);
}

function bend([line, ...others], points) {
  if (!line) return;
  let path = "", pen = "M";
  for (const point of points) {
    if (point) path += pen + point;
    pen = point ? "L" : "M";
  }
  line.setAttribute("d", path);
  others.forEach(one => one.remove()); // lines with gaps are one path here
}

function put(marks, points) {
  if (!marks.length) return;
  const there = points.filter(Boolean), made = [...marks];
  made.splice(there.length).forEach(mark => mark.remove());
  while (made.length < there.length) {
    made.push(made[0].cloneNode());
    marks[0].parentNode.append(made.at(-1));
  }
  there.forEach((point, i) => made[i].setAttribute("transform", `translate(${point})`));
}
