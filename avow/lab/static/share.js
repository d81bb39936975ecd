// What a reader takes along: the link, the same in Python, the picture, the whole page. Every page loads this.

const at = id => document.getElementById(id);
const BRIEFLY = 1600;
let python = "", drawing = null;

/** What *Copy as Python* copies; without any, there is no such button. */
export function offerPython(text) {
  python = text ?? "";
  if (at("copy-python")) at("copy-python").hidden = !python;
}

/** What *Save picture* saves: a function that makes the text of an SVG file of the element of the main figure, or null. */
export function offerPicture(make) {
  drawing = make;
}

// ---- buttons

/** Words on a button for a moment, and for those who do not see it; it keeps its width. */
function label(button, words) {
  const own = button.dataset.words ??= button.textContent;
  button.style.minWidth = `${button.offsetWidth}px`;
  button.textContent = at("shared").textContent = words;
  clearTimeout(Number(button.dataset.timer));
  button.dataset.timer = setTimeout(() => { button.textContent = own; at("shared").textContent = ""; }, BRIEFLY);
}

async function copy(button, text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // a page that was opened from a disk has no clipboard of its own
    const field = document.createElement("textarea");
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
    button.focus();
  }
  label(button, "Copied");
}

function save(button, text, kind, name) {
  const link = document.createElement("a"), url = URL.createObjectURL(new Blob([text], {type: kind}));
  Object.assign(link, {href: url, download: name}).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
  label(button, "Saved");
}

const fileName = () => `avow-${document.body.dataset.page || "lab"}`;
at("copy-link")?.addEventListener("click", event => copy(event.currentTarget, location.href));
at("copy-python")?.addEventListener("click", event => copy(event.currentTarget, python));
at("save-picture")?.addEventListener("click", event => {
  const place = mainPicture(), text = place && (drawing?.(place) ?? pictureText(place));
  if (text) save(event.currentTarget, text, "image/svg+xml", `${fileName()}.svg`); else label(event.currentTarget, "None yet");
});
at("save-page")?.addEventListener("click", event =>
  save(event.currentTarget, pageText(), "text/html", `${fileName()}.html`));

// The page's main figure: the one that is marked, else the stage, else the first figure.
const PICTURES = ["[data-picture]", "#stage", ".picture .figure", ".figure"];
const mainPicture = () => PICTURES.flatMap(selector => [...document.querySelectorAll(selector)]).find(one => one.checkVisibility());
// The picture of a claim comes with its proof.
if (at("save-picture")) at("save-picture").hidden = !document.querySelector([...PICTURES, "#seen"].join());

// ---- a picture

const LOOKS = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "stroke-linecap",
  "stroke-linejoin", "font-family", "font-size", "font-weight", "font-style", "text-anchor", "dominant-baseline", "visibility"];
const ALONE = ["opacity", "display", "clip-path"]; // what children do not inherit
const INITIAL = {opacity: "1", display: "inline", "clip-path": "none"};

const EDGE = 16; // pixels around a picture

/** What an element shows, as the text of an SVG file: an SVG with its looks, or HTML within one. */
export function pictureText(place) {
  const {width, height} = place.getBoundingClientRect(), drawn = place.matches("svg") ? [place] : outermost(place);
  const parts = drawn.map(svg => {
    const made = dressed(svg, svg.parentElement), box = svg.getBoundingClientRect(), outer = place.getBoundingClientRect();
    for (const [name, value] of Object.entries({x: box.x - outer.x, y: box.y - outer.y, width: box.width, height: box.height}))
      made.setAttribute(name, value.toFixed(1));
    return new XMLSerializer().serializeToString(made);
  });
  const paper = plain(getComputedStyle(document.body).backgroundColor);
  const title = document.createElement("title");
  title.textContent = place.getAttribute("aria-label") || document.title;
  const size = `width="${width + 2 * EDGE}" height="${height + 2 * EDGE}"`;
  return `<svg xmlns="http://www.w3.org/2000/svg" ${size} viewBox="${-EDGE} ${-EDGE} ${width + 2 * EDGE} ${height + 2 * EDGE}">` +
    `${new XMLSerializer().serializeToString(title).replace(/ xmlns="[^"]*"/, "")}<rect x="${-EDGE}" y="${-EDGE}" ${size} ` +
    `fill="${paper}"/>${parts.length ? parts.join("") : written(place, width, height + EDGE)}</svg>`;
}

const outermost = place => [...place.querySelectorAll("svg")].filter(svg => !svg.parentElement.closest("svg") && svg.checkVisibility());

/** A copy of a drawing that needs no style sheet: what it looks like stands in its attributes. */
function dressed(one, parent) {
  const made = one.cloneNode(), own = getComputedStyle(one), above = getComputedStyle(parent);
  for (const name of ["class", "style", "role", "tabindex"]) made.removeAttribute(name);
  for (const {name} of [...made.attributes]) if (/^(aria|data)-/.test(name)) made.removeAttribute(name);
  const differs = name => own.getPropertyValue(name) !== above.getPropertyValue(name);
  for (const name of LOOKS) {
    if (parent.closest("svg") && !differs(name)) made.removeAttribute(name); else put(made, name, own);
  }
  for (const name of ALONE) if (own.getPropertyValue(name) !== INITIAL[name]) put(made, name, own);
  for (const child of one.childNodes) {
    if (child.nodeType === Node.TEXT_NODE) made.append(child.cloneNode());
    else if (child.nodeType === Node.ELEMENT_NODE && getComputedStyle(child).display !== "none") made.append(dressed(child, one));
  }
  return made;
}

function put(made, name, style) {
  const value = style.getPropertyValue(name);
  made.setAttribute(name, ["fill", "stroke"].includes(name) ? plain(value) : value.replace(/url\("?[^#"]*(#[^")]+)"?\)/, "url($1)"));
}

// Colours that are mixed or have names of their own, as every program reads them.
const brush = Object.assign(document.createElement("canvas"), {width: 1, height: 1}).getContext("2d", {willReadFrequently: true});
const colours = new Map();
function plain(colour) {
  if (!/^(rgba|color|ok|lab|lch|hwb|hsl)/.test(colour)) return colour;
  if (!colours.has(colour)) {
    brush.clearRect(0, 0, 1, 1);
    brush.fillStyle = colour;
    brush.fillRect(0, 0, 1, 1);
    const [red, green, blue, alpha] = brush.getImageData(0, 0, 1, 1).data;
    colours.set(colour, alpha ? `rgba(${red}, ${green}, ${blue}, ${Number((alpha / 255).toFixed(3))})` : "none");
  }
  return colours.get(colour);
}

/** HTML within a drawing, with the page's style; its colours are those of now, whatever the reader of the file prefers. */
function written(place, width, height) {
  const holder = document.createElement("div"), style = document.createElement("style"), own = getComputedStyle(place);
  style.textContent = allStyles();
  for (const name of ["font", "color", "color-scheme", ...new Set(style.textContent.match(/--[\w-]+(?=:)/g))])
    holder.style.setProperty(name, own.getPropertyValue(name));
  holder.append(style, stilled(place));
  return `<foreignObject width="${width}" height="${height}">${new XMLSerializer().serializeToString(holder)}</foreignObject>`;
}

// ---- a page

// What only a script moves: of choices, what was not chosen goes; labels and numbers stay.
const MOVED = "button, textarea, label:has(> input:not([checked]):is([type=radio], [type=checkbox])), .control:has([type=file]), input";

/** The whole page as it stands, as one HTML file that needs neither a network nor a script, and has no dead controls. */
export function pageText() {
  const page = stilled(document.documentElement), find = selector => [...page.querySelectorAll(selector)];
  find("script, noscript, link, meta[name=avow-token], meta[http-equiv], style, .actions, .skip").forEach(one => one.remove());
  find("a[href]:not([href^='#'])").forEach(one => one.setAttribute("href", new URL(one.getAttribute("href"), location.href).href));
  // These say more than what they do: runs in a list, and what each line of a figure is.
  for (const one of find("li > button, .keys > [aria-pressed=true]")) {
    const words = document.createElement("span");
    words.append(...one.childNodes);
    one.replaceWith(words);
  }
  find(MOVED).forEach(one => one.remove());
  find("[tabindex]:not(.formula)").forEach(one => one.removeAttribute("tabindex"));
  find("[role=listbox]").forEach(one => one.inert = true);
  for (const one of find("[role=slider], [role=button]")) {
    const name = one.getAttribute("aria-label");
    for (const attribute of one.getAttributeNames()) if (/^(aria-|role$)/.test(attribute)) one.removeAttribute(attribute);
    if (name) { one.setAttribute("role", "img"); one.setAttribute("aria-label", name); }
  }
  page.querySelector("body").dataset.saved = "yes";
  const head = page.querySelector("head"), style = document.createElement("style"), policy = document.createElement("meta");
  policy.setAttribute("http-equiv", "Content-Security-Policy");
  policy.setAttribute("content", "default-src 'none'; style-src 'unsafe-inline'; img-src data:");
  style.textContent = allStyles();
  head.append(policy, style);
  const note = document.createElement("p"), link = document.createElement("a");
  Object.assign(link, {href: location.href, textContent: location.href});
  note.className = "notice";
  const how = document.body.dataset.static ? "open " : "run avow lab and open ";
  note.append(`A page saved from avow lab on ${new Date().toISOString().slice(0, 10)}, without its controls; to move it, ${how}`, link, ".");
  page.querySelector("main").prepend(note);
  return `<!doctype html>\n${page.outerHTML}`;
}

/** A copy of an element with what only the browser knows written into it: what fields hold, what canvases show. */
function stilled(whole) {
  const made = whole.cloneNode(true), originals = [...whole.querySelectorAll("*")], copies = [...made.querySelectorAll("*")];
  originals.forEach((one, i) => {
    const still = copies[i];
    if (one.matches("input[type=radio], input[type=checkbox]")) still.toggleAttribute("checked", one.checked);
    else if (one.matches("input:not([type=file])")) still.setAttribute("value", one.value);
    else if (one.matches("textarea")) still.textContent = one.value;
    else if (one.matches("canvas")) {
      const image = document.createElement("img"), box = one.getBoundingClientRect();
      for (const {name, value} of one.attributes) if (!["width", "height"].includes(name)) image.setAttribute(name, value);
      Object.assign(image, {src: one.toDataURL(), alt: one.getAttribute("aria-label") ?? ""});
      image.style.cssText += `; width: ${box.width}px; height: ${box.height}px`;
      still.replaceWith(image);
    }
  });
  return made;
}

/** Every rule of the page's style sheets, and of those that they import. */
const allStyles = () => [...document.styleSheets].map(rules).join("\n");
const rules = sheet => [...sheet.cssRules].map(rule => rule.styleSheet ? rules(rule.styleSheet) : rule.cssText).join("\n");
