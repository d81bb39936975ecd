// The explorer's stage: keys, queries and the output on a plane or a sphere, the hull of the keys, the queries that do it.
import {cone, dot, edges, hull, softmax, times} from "./cone.js";
import {element} from "./lab.js";

// The sphere is seen from here; what lies behind is drawn fainter.
const TURN = 0.62, TILT = 0.42;
const [CT, ST, CU, SU] = [Math.cos(TURN), Math.sin(TURN), Math.cos(TILT), Math.sin(TILT)];
const RIGHT = [-ST, CT, 0], UP = [-SU * CT, -SU * ST, CU], NEARER = [CU * CT, CU * ST, SU];

/** Where a point stands on the screen, y down, and how near it is. */
export function onScreen(point) {
  const [x, y, z] = point;
  if (z === undefined) return [x, -y, 1];
  const across = CT * y - ST * x, depth = CT * x + ST * y;
  return [across, -(CU * z - SU * depth), CU * depth + SU * z];
}

/** A point that is moved on the screen, y up, and towards the reader. */
export const moved = (point, right, up, nearer = 0) => point.length === 2 ? [point[0] + right, point[1] + up]
  : point.map((x, i) => x + right * RIGHT[i] + up * UP[i] + nearer * NEARER[i]);

/** The point of the sphere's front that stands there on the screen, as angles in degrees. */
export function onSphere(x, y) {
  const far = Math.hypot(x, y), [across, up] = far > 0.999 ? [x / far, -y / far] : [x, -y];
  const near = Math.sqrt(Math.max(0, 1 - across * across - up * up));
  const depth = CU * near - SU * up, z = SU * near + CU * up;
  return {angle: degrees(Math.atan2(CT * across + ST * depth, CT * depth - ST * across)),
    rise: degrees(Math.asin(Math.max(-1, Math.min(1, z))))};
}

export const degrees = turn => turn * 180 / Math.PI;

/** Weights and output of a scene whose keys or queries have moved. */
export function read(stage) {
  const heads = stage.queries.map(query => softmax(stage.keys, query));
  const weights = stage.keys.map((_, i) => heads.reduce((sum, head) => sum + head[i], 0) / heads.length);
  const outputs = stage.values[0].map((_, k) => stage.values.reduce((sum, value, i) => sum + weights[i] * value[k], 0));
  return {...stage, weights, outputs};
}

/** How far an answer is from what is to be read. */
export const off = ({values, outputs, wanted}) => Math.hypot(...outputs.map((x, i) => x - values[wanted[0]][i]));

/** Draw everything again but what can be taken hold of, which keeps the focus; whether any query does what is wanted. */
export function drawStage(svg, stage) {
  const {keys, wanted, unit, show} = stage, solid = keys[0].length === 3, looking = show === "copy" || show === "average";
  const others = keys.filter((_, i) => !wanted.includes(i)), parts = [element("circle", {r: 1, class: "rim"})];
  if (solid) parts.push(...globe());
  const good = looking ? cone(keys, wanted, stage.eps, Math.hypot(...stage.queries[0]), stage.longest) : null;
  const drawn = query => query.map(part => part / unit);
  if (looking) {
    parts.push(outline(hull(others.map(key => onScreen(key).slice(0, 2))), true, good ? "hull" : "hull full"));
    if (solid) parts.push(...edges(others).map(ends => path(ends, false, "edge")));
    if (wanted.length === 2) parts.push(path(beyond(keys[wanted[0]], keys[wanted[1]]), false, "through"));
    if (good) parts.push(path(good.wins.map(drawn), good.closed, "wins"));
    if (good?.reads) parts.push(path(good.reads.map(drawn), good.closed, good.closed ? "reads" : "reads ray"));
    parts.push(...proof(stage));
  }
  if (show === "route") parts.push(...ring(stage));
  const out = onScreen(stage.outputs);
  stage.values.forEach((value, i) => {
    const [x, y] = onScreen(value);
    parts.push(line(x, y, out[0], out[1], "pull", {"stroke-opacity": Math.min(1, stage.weights[i] * 1.2)}));
  });
  stage.queries.forEach(query => parts.push(arrow(...onScreen(drawn(query)))));
  svg.querySelector(".scene").replaceChildren(...parts);
  svg.querySelector(".output").setAttribute("transform", `translate(${out[0]} ${out[1]})`);
  return !looking || good !== null;
}

/** The combination of keys that proves it impossible, from the wanted keys to each that takes part. */
function proof({keys, wanted, shares}) {
  if (!shares) return [];
  const from = onScreen(wanted.length === 1 ? keys[wanted[0]] : keys[wanted[0]].map((x, k) => (x + keys[wanted[1]][k]) / 2));
  return shares.flatMap((share, i) => {
    if (!share || wanted.includes(i)) return [];
    const [x, y] = onScreen(keys[i]), middle = [0.45 * from[0] + 0.55 * x, 0.45 * from[1] + 0.55 * y];
    return [line(from[0], from[1], x, y, "share"),
      element("text", {class: "share", x: middle[0], y: middle[1] + 0.03}, Math.abs(share).toFixed(2))];
  });
}

/** The part of the ring on which a token reads what it should. */
function ring(stage) {
  const turn = k => Math.PI * (k / 360 - 1 / stage.keys.length), parts = []; // from between two tokens
  const token = k => [Math.cos(turn(k)), Math.sin(turn(k))];
  let arc = [];
  for (let k = 0; k <= 720; k++) {
    if (k < 720 && off(read(routed(stage, token(k)))) <= stage.eps) { arc.push(token(k)); continue; }
    if (arc.length) parts.push(path(arc.map(point => times(point, 0.89)), false, "reads arc"));
    arc = [];
  }
  return parts;
}

/** The scene of a router with its token elsewhere. */
export function routed(stage, token) {
  const {map, ahead} = stage.handle, n = stage.keys.length, query = map.map(row => dot(row, token));
  const near = stage.keys.map(key => dot(key, token)), nearest = near.findIndex(x => x > Math.max(...near) - 1e-6);
  return {...stage, queries: [query], wanted: [(nearest + ahead) % n], handle: {...stage.handle, at: token}};
}

function beyond(a, b) {
  const along = b.map((x, i) => x - a[i]), long = Math.hypot(...along) || 1;
  return [-3, 3].map(far => a.map((x, i) => x + along[i] / long * far));
}

const outline = (points, closed, name) => element("path", {class: name, d: "M" + points.map(([x, y]) => `${x.toFixed(4)} ${y.toFixed(4)}`).join("L") + (closed ? "Z" : "")});
const path = (points, closed, name) => outline(points.map(onScreen), closed, name);

function globe() {
  const around = Array.from({length: 73}, (_, i) => i * Math.PI / 36);
  const rings = [a => [Math.cos(a), Math.sin(a), 0], a => [Math.cos(a), 0, Math.sin(a)], a => [0, Math.cos(a), Math.sin(a)]];
  return rings.map(ring => path(around.map(ring), false, "ring"));
}

const line = (x1, y1, x2, y2, name, more = {}) => element("line", {x1, y1, x2, y2, class: name, ...more});

function arrow(x, y) {
  const long = Math.hypot(x, y);
  if (long < 0.02) return element("circle", {r: 0.03, class: "tip"});
  const [ux, uy] = [x / long, y / long], back = 0.1;
  const [bx, by] = [x - ux * back, y - uy * back];
  return element("g", {class: "query"}, line(0, 0, bx, by, "shaft"),
    element("polygon", {class: "tip", points: `${x},${y} ${bx - uy * 0.05},${by + ux * 0.05} ${bx + uy * 0.05},${by - ux * 0.05}`}));
}
