// A reading as numbers and sentences: bytes to arrays, heads by words, the address. Nothing here touches the page.
// A slider's position s is 0 for "exact" and i + 1 for stops[i]; a token is needed at s if its level is s or more.

/** The arrays of a reading: one entry a row with weights, levels, bounds and errors, and what follows from them. */
export async function unpack(reading) {
  const packed = Uint8Array.from(atob(reading.data), letter => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const H = reading.layers * reading.heads, S = reading.stops.length;
  let at = 0;
  const take = size => bytes.subarray(at, at += size);
  const asked = new Map(reading.rows.map((position, r) => [position, row(position + 1, H, S,
    {weights: take(H * (position + 1)), levels: take(H * (position + 1)), bounds: take(H * S), errors: take(H * S)},
    reading.next[r], reading.read[r], reading.without[r])]));
  return {...reading, H, S, asked, promises: take(H * reading.methods.length), data: null};
}

/** One asking word: `kept` counts the tokens each head needs, `readers` the heads that need each token. */
function row(n, H, S, arrays, next, read, without) {
  const kept = new Uint16Array((S + 1) * H), readers = new Uint16Array((S + 1) * n);
  for (let h = 0, i = 0; h < H; h++) for (let t = 0; t < n; t++, i++) for (let s = 0; s <= arrays.levels[i]; s++) {
    kept[s * H + h]++;
    readers[s * n + t]++;
  }
  return {...arrays, n, kept, readers, next, read: [1, ...read], without};
}

/** The next words at a position of the slider, most probable first. */
export const nextWords = (row, s) => s ? row.next.stops[s - 1] : row.next.exact;

/** A bound, an error or a promise from its byte; zero stands for what is below 1e-8, or for no promise. */
export const fromCode = code => 10 ** ((code - 255) / 32);

/** How many heads' measured errors exceed their bounds at a position of the slider. */
export function brokenPromises(row, H, S, s) {
  let broken = 0;
  for (let h = 0; s && h < H; h++) broken += row.errors[h * S + s - 1] > row.bounds[h * S + s - 1];
  return broken;
}

// What a head does over the whole text, as a name and as the end of a sentence: `head_kinds` has the rules.
export const KINDS = {
  resting: ["rests on the first token", "most of its weight lies on the start mark: it finds nothing to look for"],
  previous: ["word before", "it mostly reads the word just before the one that asks"],
  same: ["same word", "where the word that asks stood before, it often reads it there"],
  induction: ["induction", "where the word that asks stood before, it often reads what followed it there"],
  local: ["local", "it mostly reads the last few words"],
  wide: ["wide", "none of the other habits: it reads many words, or distant ones"],
};
export const kindName = kind => KINDS[kind]?.[0] ?? kind;
export const headName = (reading, h) => `Layer ${Math.floor(h / reading.heads)}, head ${h % reading.heads}`;

/** The heads that a search means: "layer 18 head 6", "18.6", "layer 3", "induction"; all of them for no words. */
export function matching(reading, words) {
  const all = [...reading.kinds.keys()], wanted = words.trim().toLowerCase();
  const [, layer, head] = /^(?:l(?:ayer)?\s*)?(\d+)(?:[\s.,:]*(?:h(?:ead)?)?[\s.]*(\d+))?$/.exec(wanted) ?? [];
  const inside = h => Math.floor(h / reading.heads) === Number(layer) && (!head || h % reading.heads === Number(head));
  if (layer) return all.filter(inside);
  return all.filter(h => `${kindName(reading.kinds[h])} ${reading.kinds[h]}`.includes(wanted));
}

/** How many of the last words every head reads at every error: those after the last full group of `sketch.py`. */
const GROUP = 64;
export const alwaysRead = n => n % GROUP;

/** Up to `most` next words with both probabilities; null where a list does not hold the word. */
export function compared(exactly, nearly, most = 4) {
  const exact = new Map(exactly), near = new Map(nearly), [best] = near.keys();
  const words = [...exact.keys()].slice(0, most);
  if (!words.includes(best)) words[most - 1] = best;
  return words.map(word => ({word, exact: exact.get(word) ?? null, near: near.get(word) ?? null}));
}

// Signs whose names say more than a speck between quotes.
const SIGNS = {",": "a comma", ".": "a full stop", ":": "a colon", ";": "a semicolon", "!": "an exclamation mark",
  "?": "a question mark", "(": "an opening bracket", ")": "a closing bracket", "'": "an apostrophe", "’": "an apostrophe",
  '"': "a quotation mark", "«": "an opening quotation mark", "»": "a closing quotation mark", "-": "a hyphen", "—": "a dash",
  "...": "three dots", "#": "a number sign", "_": "an underscore", "*": "an asterisk", "/": "a slash", "=": "an equals sign"};
const several = (count, one) => count > 1 ? `${count} ${one}s` : `a ${one}`;

/** A token as a sentence speaks of it: a word in quotes, a sign or white space by its name. */
export function quoted(word) {
  const seen = word.trim(), lines = word.split("\n").length - 1, spaces = word.length - lines;
  if (/[\p{L}\p{N}]/u.test(seen)) return `“${seen}”`;
  if (seen) return SIGNS[seen] ?? `the sign${seen.length > 1 ? "s" : ""} “${seen}”`;
  return [lines && several(lines, "new line"), spaces && several(spaces, "space")].filter(Boolean).join(" and ") || "an empty word";
}

/** A token as a label: like `quoted`, without quotes and articles. */
export const labelled = word => quoted(word).replace(/^(an?|the signs?) /, "").replace(/^“(.*)”$/, "$1");

export const capital = text => text[0].toUpperCase() + text.slice(1);

/** The whole word that a token ends, with what is written to it without a space. */
export function wholeWord(words, t) {
  let from = t;
  while (from > 1 && /^\S/.test(words[from])) from--;
  return words.slice(from, t + 1).join("");
}

/** A share in percent, with more digits where it is small. */
export function percent(share) {
  const hundred = share * 100;
  return `${hundred && hundred < 0.1 ? "<0.1" : Number(hundred.toFixed(hundred < 10 ? 1 : 0))}%`;
}

/** A bound in percent, as the slider has it, in two digits, for its byte holds no more; never less than it is. */
export function atMost(number) {
  const hundred = Math.max(number * 100, 0.001), step = 10 ** (Math.floor(Math.log10(hundred)) - 1);
  return `${number * 100 < 0.001 ? "below" : "at most"} ${Number((Math.ceil(hundred / step - 1e-9) * step).toPrecision(2))}%`;
}

/** What the slider's position means for the word that asks, in a sentence. */
export function sentence(reading, row, s) {
  const [[exact, chance]] = row.next.exact, [[near]] = nextWords(row, s), short = row.read.at(-1) > 0.995;
  if (!s) return `Nothing is left out: ${reading.H} heads read all ${row.n} words. The next word is ${quoted(exact)}, `
    + `${percent(chance)}.${short ? " This text is too short to skip anything." : ""}`;
  const word = near === exact ? `is still ${quoted(exact)}` : `changes from ${quoted(exact)} to ${quoted(near)}`;
  if (short) return `This text is too short to skip anything: all of it is read, and the next word ${word}.`;
  const error = percent(reading.stops[s - 1]), read = percent(row.read[s]);
  // What is proved is about each head; what that does to the next word is tried.
  return `Proved of all heads: with ${read} of their readings, none is off by more than ${error} of its longest value. `
    + `Tried: the next word ${word}.`;
}

/** Which of the text's whole words a token belongs to. */
export const wordAt = (reading, t) => reading.starts.findLastIndex(start => start <= t);
export const wholeAt = ({words, starts}, word) => words.slice(starts[word], starts[word + 1]).join("");

/** Words for the keys of the page "One head": those that a head reads most, in the order of the text, and the heaviest at
 * place 1, for that key is read there at first. */
export function keyWords(reading, {n, weights}, h, most = 8) {
  const name = t => t ? labelled(wholeAt(reading, wordAt(reading, t))) : "start", heavy = t => weights[h * n + t];
  const found = new Map();
  for (const t of [...Array(n).keys()].sort((a, b) => heavy(b) - heavy(a) || b - a)) {
    if (found.size < most && !found.has(name(t))) found.set(name(t), t);
  }
  const [first, ...others] = found.keys(), [before, ...after] = others.sort((a, b) => found.get(a) - found.get(b));
  return [before, first, ...after].filter(Boolean);
}

/** What crossing out a whole word did to the next one, in a sentence; `heads` must read it at the slider's position. */
export function crossedSentence(reading, row, s, word) {
  const [[exact, chance]] = row.next.exact, [[near, now]] = row.without[word], from = reading.starts[word];
  const heads = Math.max(...row.readers.subarray(s * row.n + from, s * row.n + reading.starts[word + 1]));
  const name = quoted(wholeAt(reading, word));
  const was = percent(chance), is = percent(now);
  const what = near !== exact ? `changes from ${quoted(exact)}, ${was}, to ${quoted(near)}, ${is}`
    : `is still ${quoted(near)}, ${is === was ? `${is} as before` : `${is} instead of ${was}`}`;
  return `Tried without ${name}: the next word ${what}. `
    + (s ? `At this error ${heads} heads must read it, whether it matters or not.` : "No later word may read it now.");
}

/** What an address says: story, asking word, head, position of the slider, the word that is crossed out; null or 0
 * where it says nothing usable. */
export function fromAddress(search, reading) {
  const says = new URLSearchParams(search), [layer, head] = (says.get("head") ?? "").split(".").map(Number);
  const word = Number(says.get("word") ?? NaN), tolerance = Number(says.get("tol") ?? NaN);
  const known = layer < reading.layers && head < reading.heads;
  const asks = reading.asked.has(word) ? word : reading.prompt - 1;
  const crossed = reading.starts.indexOf(Number(says.get("without") ?? NaN));
  return {word: asks, head: known ? layer * reading.heads + head : null, s: reading.stops.indexOf(tolerance) + 1,
    crossed: reading.asked.get(asks).without[crossed] ? crossed : null};
}

/** The address of a state; what is as it is at first is left out. */
export function toAddress({story, word, head, s, crossed}, reading) {
  const says = new URLSearchParams({story});
  if (word !== null && word !== reading.prompt - 1) says.set("word", word);
  if (head !== null) says.set("head", `${Math.floor(head / reading.heads)}.${head % reading.heads}`);
  if (s) says.set("tol", reading.stops[s - 1]);
  if (crossed !== null) says.set("without", reading.starts[crossed]);
  return `?${says}`;
}
