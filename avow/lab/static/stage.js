// The explorer's stage: keys, queries and the output on a plane or a sphere, and one thing to take hold of.
import {element} from "./lab.js";

// The sphere is seen from here; what lies behind is drawn fainter.
const TURN = 0.62, TILT = 0.42;
const [CT, ST, CU, SU] = [Math.cos(TURN), Math.sin(TURN), Math.cos(TILT), Math.sin(TILT)];

/** Where a point stands on the screen, y down, and how near it is. */
export function onScreen(point) {
  const [x, y, z] = point;
  if (z === undefined) return [x, -y, 1];
  const across = CT * y - ST * x, depth = CT * x + ST * y;
  return [across, -(CU * z - SU * depth), CU * depth + SU * z];
}

/** The point of the sphere's front that stands there on the screen, as angles in degrees. */
export function onSphere(x, y) {
  const far = Math.hypot(x, y), [across, up] = far > 0.999 ? [x / far, -y / far] : [x, -y];
  const near = Math.sqrt(Math.max(0, 1 - across * across - up * up));
  const depth = CU * near - SU * up, z = SU * near + CU * up;
  return {angle: degrees(Math.atan2(CT * across + ST * depth, CT * depth - ST * across)),
    rise: degrees(Math.asin(Math.max(-1, Math.min(1, z))))};
}

export const degrees = turn => turn * 180 / Math.PI;

/** Draw everything again but the handle, which keeps the focus. */
export function drawStage(svg, stage) {
  const solid = stage.keys[0].length === 3, parts = [];
  parts.push(element("circle", {r: 1, class: "rim"}));
  if (solid) parts.push(...globe());
  const out = onScreen(stage.outputs);
  const shares = stage.weights;
  stage.values.forEach((value, i) => {
    const [x, y] = onScreen(value);
    parts.push(line(x, y, out[0], out[1], "pull", {"stroke-opacity": Math.min(1, shares[i] * 1.2)}));
  });
  stage.queries.forEach(query => {
    const [x, y] = onScreen(query.map(part => part / stage.unit));
    parts.push(arrow(x, y));
  });
  stage.keys.forEach((key, i) => {
    const [x, y, near] = onScreen(key), size = 0.05 + 0.13 * Math.sqrt(shares[i]);
    const away = Math.hypot(x, y) || 1;
    const name = stage.wanted.includes(i) ? "key wanted" : "key";
    parts.push(element("g", {class: name, opacity: near < 0 ? 0.45 : 1},
      element("circle", {cx: x, cy: y, r: size}),
      element("text", {x: x + x / away * (size + 0.11), y: y + y / away * (size + 0.11) + 0.035}, String(i))));
  });
  parts.push(element("path", {class: "output", d: `M${out[0]} ${out[1] - 0.075}l.075 .075l-.075 .075l-.075 -.075z`}));
  svg.querySelector(".scene").replaceChildren(...parts);
}

function globe() {
  const around = Array.from({length: 73}, (_, i) => i * Math.PI / 36);
  const rings = [a => [Math.cos(a), Math.sin(a), 0], a => [Math.cos(a), 0, Math.sin(a)], a => [0, Math.cos(a), Math.sin(a)]];
  return rings.map(ring => element("path", {class: "ring",
    d: "M" + around.map(a => onScreen(ring(a)).slice(0, 2).map(x => x.toFixed(3)).join(" ")).join("L")}));
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
