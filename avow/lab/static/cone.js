// What any query can do with some keys, in float arithmetic: which directions score the wanted keys above all others, how
// long a query must be to read them, and the hull of the keys. Places are arrays of two or three numbers.

export const dot = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);
export const times = (a, share) => a.map(x => x * share);
export const minus = (a, b) => a.map((x, i) => x - b[i]);
const plus = (a, b) => a.map((x, i) => x + b[i]);
const norm = a => Math.sqrt(dot(a, a));
export const unit = a => times(a, 1 / (norm(a) || 1));
const cross = (a, b) => [a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]];

/** What a query gives each key. */
export function softmax(keys, query) {
  const scores = keys.map(key => dot(key, query)), top = Math.max(...scores), parts = scores.map(score => Math.exp(score - top));
  const total = parts.reduce((a, b) => a + b, 0);
  return parts.map(part => part / total);
}

/** Whether every wanted key gets the weight that ε leaves it. */
export function keeps(keys, wanted, query, eps) {
  const weights = softmax(keys, query);
  return wanted.every(i => weights[i] >= 1 / (wanted.length + eps));
}

/** Where two wanted keys score alike: a query has no part along this; null for one key. */
export const tie = (keys, wanted) => wanted.length < 2 ? null : unit(minus(keys[wanted[0]], keys[wanted[1]]));

const without = (a, axis) => axis ? minus(a, times(axis, dot(a, axis))) : a;

/** What a direction must be positive on: the wanted key less each of the others. */
function gaps(keys, wanted) {
  const axis = tie(keys, wanted), own = keys[wanted[0]];
  return keys.filter((_, j) => !wanted.includes(j)).map(key => without(minus(own, key), axis));
}

/** The direction in which the wanted keys are ahead by most; null if there is none: a wanted key is in the hull.
 *
 * It is the point of the gaps' hull that is nearest to 0, and lies on a point, a line or a plane of at most three. */
export function bestDirection(keys, wanted) {
  const all = gaps(keys, wanted);
  let best = null, least = 1e-12;
  const offer = point => {
    const size = dot(point, point);
    if (size > least && all.every(gap => dot(gap, point) >= size * (1 - 1e-9))) [best, least] = [point, size];
  };
  all.forEach((a, i) => {
    offer(a);
    all.slice(i + 1).forEach((b, j) => {
      const along = minus(b, a), size = dot(along, along);
      if (size < 1e-18) return;
      offer(minus(a, times(along, dot(a, along) / size)));
      if (a.length === 3) all.slice(i + j + 2).forEach(c => {
        const normal = cross(along, minus(c, a)), area = dot(normal, normal);
        if (area > 1e-18) offer(times(normal, dot(a, normal) / area));
      });
    });
  });
  return best && unit(best);
}

/** How far one can turn from 0 before something no longer holds, in radians. */
function turned(holds, most = Math.PI / 2) {
  let [low, high] = [0, most];
  for (let step = 0; step < 26; step++) {
    const middle = (low + high) / 2;
    if (holds(middle)) low = middle; else high = middle;
  }
  return low;
}

/** The least length of a query in a direction that reads the wanted keys; Infinity beyond `most`. */
function lengthNeeded(keys, wanted, eps, direction, most) {
  if (!keeps(keys, wanted, times(direction, most), eps)) return Infinity;
  let [low, high] = [0, most];
  for (let step = 0; step < 30; step++) {
    const middle = (low + high) / 2;
    if (keeps(keys, wanted, times(direction, middle), eps)) high = middle; else low = middle;
  }
  return high;
}

/** The queries that read the wanted keys, as outlines of queries; `wins` holds the directions that score them highest.
 *
 * On the plane `reads` is a region up to the longest query, or a ray. In space both are drawn at one length, where they
 * are patches of a sphere, or arcs. */
export function cone(keys, wanted, eps, length, longest) {
  const middle = bestDirection(keys, wanted);
  if (!middle) return null;
  const axis = tie(keys, wanted), all = gaps(keys, wanted), solid = middle.length === 3;
  const wins = direction => all.every(gap => dot(gap, direction) > 0);
  const reads = direction => keeps(keys, wanted, times(direction, solid ? length : longest), eps);
  const there = reads(middle), at = (side, turn) => plus(times(middle, Math.cos(turn)), times(side, Math.sin(turn)));
  if (solid) {
    const first = axis ? cross(axis, middle) : unit(cross(middle, Math.abs(middle[2]) < 0.9 ? [0, 0, 1] : [1, 0, 0]));
    const second = cross(middle, first);
    const sides = axis ? [first, times(first, -1)] : around(48).map(a => plus(times(first, Math.cos(a)), times(second, Math.sin(a))));
    const outline = holds => sides.map(side => [side, turned(turn => holds(at(side, turn)), Math.PI)]);
    const drawn = outlines => axis ? arc(outlines) : outlines.map(([side, turn]) => times(at(side, turn), length));
    const arc = ([[side, right], [, left]]) => span(-left, right, 24).map(turn => times(at(side, turn), length));
    return {wins: drawn(outline(wins)), reads: there ? drawn(outline(reads)) : null, closed: !axis};
  }
  if (axis) {
    const needed = lengthNeeded(keys, wanted, eps, middle, longest);
    return {wins: [[0, 0], times(middle, longest)], reads: there ? [times(middle, needed), times(middle, longest)] : null, closed: false};
  }
  const side = [-middle[1], middle[0]], ends = holds => [-turned(turn => holds(at(side, -turn))), turned(turn => holds(at(side, turn)))];
  const [from, to] = ends(wins), far = span(from, to, 24).map(turn => times(at(side, turn), longest));
  if (!there) return {wins: [[0, 0], ...far], reads: null, closed: true};
  const turns = span(...ends(reads), 48), edge = turns.map(turn => at(side, turn));
  const near = edge.map(direction => times(direction, Math.min(longest, lengthNeeded(keys, wanted, eps, direction, longest))));
  return {wins: [[0, 0], ...far], reads: [...near, ...edge.reverse().map(direction => times(direction, longest))], closed: true};
}

const span = (from, to, parts) => Array.from({length: parts + 1}, (_, i) => from + (to - from) * i / parts);
const around = parts => Array.from({length: parts}, (_, i) => 2 * Math.PI * i / parts);

/** The corners of the hull of points on the plane, in order. */
export function hull(points) {
  const sorted = [...points].sort(([a, b], [c, d]) => a - c || b - d);
  const turn = ([a, b], [c, d], [e, f]) => (c - a) * (f - b) - (d - b) * (e - a);
  const half = order => {
    const kept = [];
    for (const point of order) {
      while (kept.length > 1 && turn(kept.at(-2), kept.at(-1), point) <= 0) kept.pop();
      kept.push(point);
    }
    return kept.slice(0, -1);
  };
  return sorted.length < 3 ? sorted : [...half(sorted), ...half([...sorted].reverse())];
}

/** The edges of the hull of points in space. */
export function edges(points) {
  const found = new Map();
  points.forEach((a, i) => points.forEach((b, j) => points.forEach((c, k) => {
    if (!(i < j && j < k)) return;
    const normal = cross(minus(b, a), minus(c, a)), heights = points.map(point => dot(normal, minus(point, a)));
    const slack = 1e-9 * (1 + norm(normal));
    if (heights.every(height => height <= slack) || heights.every(height => height >= -slack))
      for (const [one, other] of [[i, j], [j, k], [i, k]]) found.set(`${one} ${other}`, [points[one], points[other]]);
  })));
  return [...found.values()];
}
