// The bench: the shared script draws figures and facts; here are the tokens that sparse attention read.
import {element, start} from "./lab.js";

const strip = document.getElementById("strip"), canvas = document.getElementById("tokens");
const costs = document.getElementById("costs");
const MARKS = {square: "■", diamond: "◆", "triangle-up": "▲", "triangle-down": "▼", pentagon: "⬟", hexagon: "⬢"};
let shown = null;

start({
  proving: "rows at the size you chose, against float64",
  preview(answer) {
    shown = answer.strip;
    strip.hidden = !shown;
    costs.classList.add("stale"); // what stands there was found before this move
    if (shown) paint();
  },
  verdict({legend}) {
    document.getElementById("methods").replaceChildren(...legend.map(({words, own_mechanism, colour, symbol}) => {
      const mark = element("b", {}, own_mechanism ? "×" : MARKS[symbol] ?? "●");
      mark.style.color = colour;
      return element("span", {}, mark, ` ${words}${own_mechanism ? ", another mechanism" : ""}`);
    }));
    costs.classList.remove("stale");
    document.getElementById("facts").classList.add("sure"); // a warning's numbers are as sure as any
  },
});
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
  const told = `Of ${tokens} tokens, ${rows.length} queries read ${Math.min(...read)} to ${Math.max(...read)} each.`;
  document.getElementById("read").textContent = told;
  canvas.setAttribute("aria-label", told);
}
