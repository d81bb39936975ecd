// Runs: a list to choose from, tables of experiments, and a look at the disk every two seconds while somebody watches.
import {element, move, start} from "./lab.js";

const EVERY = 2000;
const at = id => document.getElementById(id);
const buttons = new Map();
let listed = "", tabled = "";

start({preview(answer) {
  at("none").hidden = answer.runs.length > 0;
  at("controls").hidden = !answer.runs.length;
  document.querySelectorAll(".folder").forEach(one => one.textContent = answer.folder);
  at("curves").hidden = !answer.figures.curves;
  list(answer.runs, answer.folder);
  const said = JSON.stringify(answer.knowledge);
  if (said !== tabled) {
    const [newest = "", ...rest] = answer.knowledge;
    const older = element("details", {}, element("summary", {}, `${rest.length} more`));
    older.insertAdjacentHTML("beforeend", rest.join(""));
    at("knowledge").innerHTML = newest;
    if (rest.length) at("knowledge").append(older);
    for (const cell of at("knowledge").querySelectorAll("[data-share]")) cell.style.setProperty("--share", cell.dataset.share);
  }
  tabled = said;
}});

setInterval(() => { if (document.visibilityState === "visible") move({}); }, EVERY);
document.addEventListener("visibilitychange", () => { if (document.visibilityState === "visible") move({}); });

// Built again only when runs come or go: a button whose words alone change keeps the focus.
function list(runs, folder) {
  const names = JSON.stringify(runs.map(run => run.name));
  if (names !== listed) {
    buttons.clear();
    const groups = new Map();
    for (const run of runs) groups.set(run.group, [...(groups.get(run.group) ?? []), run]);
    // Folders that were written to last stand first, and open.
    at("runs").replaceChildren(...[...groups].map(([group, some], i) => {
      const open = i === 0 || some.some(run => run.chosen) ? {open: ""} : {};
      const compared = some.length > 1 ? [choice(group || ".", "Draw them together")] : [];
      return element("details", open, element("summary", {}, `${group || folder} (${some.length})`), ...compared,
        element("ul", {}, ...some.map(row)));
    }));
    listed = names;
  }
  for (const run of runs) {
    const {button, words, bar} = buttons.get(run.name);
    button.setAttribute("aria-pressed", run.chosen);
    button.dataset.state = run.state;
    words.textContent = run.summary;
    bar.style.setProperty("--share", run.share);
  }
}

function row(run) {
  const words = element("small", {}), bar = element("i", {"aria-hidden": "true"});
  const button = choice(run.name, run.name.slice(run.group ? run.group.length + 1 : 0));
  button.append(words, bar);
  buttons.set(run.name, {button, words, bar});
  return element("li", {}, button);
}

function choice(name, words) {
  const button = element("button", {type: "button"}, element("b", {}, words));
  button.addEventListener("click", () => move({run: name}));
  return button;
}
