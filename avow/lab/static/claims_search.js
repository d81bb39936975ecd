// The search for a counterexample, followed as it goes: it comes in slices, each asked for after the last, so that it
// can be stopped. The page draws the cases that were tried and the one that came nearest; Python has judged them all.
import {brief, element, move, post, trouble, value} from "./lab.js";
import {plot} from "./claims_plot.js";

const at = id => document.getElementById(id), box = name => document.querySelector(`[data-name=${name}]`);
const AGREES = 1e-30; // below this, two sides of an equality are equal but for rounding
const SHOWN = 700, SOON = 250; // how long a slice is played, in ms: the first, and those after it
const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
let claim = {}, key = "", going = null, marks = [], best = null, end = null, along = 0;

/** Offer what can be attacked of the chosen claim. */
export function attackable(chosen) {
  if (chosen.id !== claim.id) forget();
  claim = chosen;
  const names = claim.variants, variant = value("variant");
  for (const id of ["variants", "budget", "attack"]) at(id).hidden = !names.length;
  at("note").hidden = !claim.note;
  at("note").textContent = claim.note;
  const old = [...at("variants").querySelectorAll("input")];
  if (old.map(one => one.value).join() === names.join()) return old.forEach(one => { one.checked = one.value === variant; });
  at("variants").replaceChildren(at("variants").firstElementChild, ...names.map(name => {
    const radio = element("input", {type: "radio", name: "attacked", value: name});
    radio.checked = name === variant;
    radio.addEventListener("change", () => { forget(); move({variant: name, hunt: null}); });
    return element("label", {}, radio, name);
  }));
}

/** Search if the address asks for it, and nothing has been sought so far. */
export function searched(chosen) {
  const settings = {claim: chosen.id, variant: value("variant"), cases: value("cases"), seed: value("seed")};
  if (value("hunt") !== true || !chosen.variants.length || key === JSON.stringify(settings)) return;
  forget();
  key = JSON.stringify(settings);
  seek(settings);
}

// Another press draws again.
at("attack").addEventListener("click", () => {
  if (value("hunt") === true && key) return move({seed: (value("seed") + 1) % 100});
  key = "";
  move({hunt: true});
});
at("stop").addEventListener("click", () => {
  const tried = Number(at("progress").value);
  halt();
  at("outcome").textContent = `Stopped after ${tried.toLocaleString("en")} cases, and none broke it. That proves nothing.`;
  at("attack").focus();
});
for (const name of ["cases", "seed"]) box(name).addEventListener("input", () => { forget(); move({hunt: null}); });
addEventListener("resize", () => { if (!at("case").hidden) draw(); });

async function seek(settings) {
  const mine = going = new AbortController();
  const ask = after => post("claims/verdict", JSON.stringify({...settings, after}), mine.signal);
  at("stop").hidden = at("progress").hidden = false;
  at("attack").hidden = true;
  at("progress").max = settings.cases;
  progress(0);
  bars();
  let first = true, coming = ask(0);
  while (coming) {
    const said = await coming;
    if (going !== mine) return;
    if (!said.answer) { halt(); trouble(said.error); return; }
    const {attack} = said.answer;
    // While this slice is played, the next one is computed.
    coming = attack.done ? null : ask(attack.tried);
    await play(attack, first ? SHOWN : SOON, mine);
    if (going !== mine) return;
    first = false;
    if (attack.done) finish(attack);
  }
}

/** Show the cases of a slice one after the other. */
function play(attack, length, mine) {
  const begun = performance.now(), from = Number(at("progress").value), queue = [...attack.marks];
  return new Promise(done => {
    const step = () => {
      if (going !== mine) return done();
      const part = still() ? 1 : Math.min(1, (performance.now() - begun) / length);
      const reached = from + (attack.tried - from) * part;
      while (queue.length && (part === 1 || queue[0][0] <= reached)) take(queue.shift());
      progress(Math.round(reached));
      draw();
      if (part === 1) done(); else requestAnimationFrame(step);
    };
    step();
  });
}

function take([number, excess, nearest, numbers]) {
  const mark = {number, excess: Math.abs(excess) < AGREES ? 0 : excess, numbers};
  marks.push(mark);
  if (nearest) best = mark;
}

function progress(tried) {
  at("progress").value = tried;
  at("tried").textContent = `${tried.toLocaleString("en")} of ${Number(at("progress").max).toLocaleString("en")} cases`;
}

function finish(attack) {
  end = attack;
  halt();
  Object.assign(at("caught"), {hidden: false, className: `badge ${attack.tone}`, textContent: attack.word});
  at("outcome").textContent = attack.says;
  at("attack").textContent = "Search again, with other cases";
  draw();
}

/** End the search; what it has found so far stays. */
function halt() {
  going?.abort();
  going = null;
  at("stop").hidden = at("progress").hidden = true;
  at("attack").hidden = !claim.variants?.length;
}

function forget() {
  halt();
  [key, marks, best, end, along] = ["", [], null, null, 0];
  at("caught").hidden = at("case").hidden = true;
  at("outcome").textContent = at("tried").textContent = "";
  at("attack").textContent = "Search for a counterexample";
}

// ---- what is drawn: the numbers of the nearest case, and all cases over one of them

function bars() {
  at("case").hidden = false;
  at("numbers").replaceChildren(...claim.numbers.map(({name, low, high}, place) => {
    const button = element("button", {type: "button", "aria-pressed": place === along}, name);
    button.addEventListener("click", () => { along = place; draw(); });
    const track = element("span", {class: "track", "aria-hidden": "true"}, element("i", {}));
    return element("div", {}, button, element("small", {}, brief(low)), track, element("small", {}, brief(high)), element("output", {}, "–"));
  }));
  at("reads").textContent = claim.reads;
}

function draw() {
  const {name, low, high} = claim.numbers[along], broken = end?.tone === "refuted";
  [...at("numbers").children].forEach((row, place) => {
    const number = best?.numbers[place], span = claim.numbers[place].high - claim.numbers[place].low;
    row.querySelector("button").setAttribute("aria-pressed", place === along);
    row.querySelector("output").textContent = number === undefined ? "–" : String(Number(number.toFixed(3)));
    row.querySelector("i").style.setProperty("--at", number === undefined ? 0.5 : (number - claim.numbers[place].low) / (span || 1));
    row.classList.toggle("broken", broken);
  });
  const curve = end?.curves[along]?.map(([x, y]) => [x, Math.abs(y) < AGREES ? 0 : y]) ?? [];
  const says = best && (broken ? `breaks it${best.excess ? ` by ${brief(best.excess)}` : ""}`
    : best.excess === 0 ? "meets it with equality" : `nearest: ${brief(-best.excess)} away`);
  const caption = curve.length ? `By how much it is broken along ${name}, the other numbers as they are`
    : `Cases tried, over ${name}: above the line one would break it`;
  at("map").querySelector("figcaption").textContent = caption;
  plot(at("map").querySelector("svg"), {
    name: `${caption}. ${says ?? ""}`, x: {low, high, title: name}, y: {title: "broken by", bent: true, zero: "above this line it is broken"},
    dots: marks.map(mark => [mark.numbers[along], mark.excess]), lines: curve.length ? [{points: curve}] : [],
    mark: best && {at: [best.numbers[along], best.excess], says, broken}});
  chart();
}

/** The claim's own figure with the numbers of the counterexample, where it can be drawn. */
function chart() {
  const drawn = end?.chart;
  at("own").hidden = !drawn;
  if (!drawn) return;
  const {[drawn.mark]: [[x], [y]], ...series} = drawn.series;
  const lines = Object.entries(series).map(([name, [xs, ys]]) => ({name, points: xs.map((x, i) => [x, ys[i]])}));
  at("own").querySelector("figcaption").textContent = drawn.title;
  at("own").querySelector(".legend").replaceChildren(...lines.map(({name}, i) => element("span", {class: `key line${i}`}, name)));
  plot(at("own").querySelector("svg"), {name: `${drawn.title}. The counterexample is at ${brief(x)}, ${brief(y)}.`,
    x: {log: drawn.log_x, title: drawn.x}, y: {log: drawn.log_y, title: drawn.y}, dots: [], lines,
    mark: {at: [x, y], says: "counterexample", broken: true}});
}
