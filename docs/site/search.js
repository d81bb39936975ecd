// Every word of the query must begin a word of a part: in its heading, in the title of its page, or in its text.
(() => {
  const MOST = 40, AROUND = 90;
  const pages = JSON.parse(document.getElementById("index").textContent);
  const box = document.querySelector(".search.large input");
  const list = document.getElementById("results"), found = document.getElementById("found");

  const escaped = (word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  const starting = (word) => new RegExp(`(?<![\\p{L}\\p{N}])${escaped(word)}`, "iu");
  const whole = (word) => new RegExp(`^${escaped(word)}$`, "iu");

  function search(query) {
    const words = query.trim().split(/\s+/).filter(Boolean);
    const results = [];
    if (!words.length) return results;
    const patterns = words.map(starting), exact = whole(words.join(" "));
    for (const [title, address, parts] of pages) {
      for (const [anchor, heading, text] of parts) {
        let score = exact.test(heading) ? 20 : 0;
        for (const pattern of patterns) {
          const here = (pattern.test(heading) ? 6 : 0) + (pattern.test(text) ? 1 : 0);
          const points = here + (pattern.test(title) ? 2 : 0);
          if (!points) { score = -1; break; }
          score += points;
        }
        // What only the title of the page says is found once, at its beginning.
        if (score > 0 && (heading === title || patterns.some((one) => one.test(heading + " " + text)))) {
          results.push({ title, heading, text, score, link: anchor ? `${address}#${anchor}` : address });
        }
      }
    }
    return results.sort((a, b) => b.score - a.score);
  }

  function excerpt(text, words) {
    const pattern = new RegExp(`(?<![\\p{L}\\p{N}])(?:${words.map(escaped).join("|")})`, "giu");
    const at = Math.max(0, text.search(pattern));
    let from = Math.max(0, at - AROUND), to = Math.min(text.length, at + 2 * AROUND);
    if (from) from = text.indexOf(" ", from) + 1;
    if (to < text.length) to = Math.max(at, text.lastIndexOf(" ", to));
    const shown = text.slice(from, to), line = document.createElement("p");
    let last = 0;
    for (const match of shown.matchAll(pattern)) {
      const mark = document.createElement("mark");
      mark.textContent = match[0];
      line.append(shown.slice(last, match.index), mark);
      last = match.index + match[0].length;
    }
    line.prepend(from ? "… " : "");
    line.append(shown.slice(last), to < text.length ? " …" : "");
    return line;
  }

  function show() {
    const query = box.value, words = query.trim().split(/\s+/).filter(Boolean), results = search(query);
    list.replaceChildren(...results.slice(0, MOST).map(({ title, heading, text, link }) => {
      const item = document.createElement("li"), anchor = document.createElement("a");
      anchor.href = link;
      anchor.textContent = heading === title ? title : `${title}: ${heading}`;
      item.append(anchor, excerpt(text, words));
      return item;
    }));
    const shown = results.length > MOST ? `the first ${MOST} of ${results.length} places` : `${results.length} places`;
    found.textContent = !words.length ? "" : results.length === 1 ? "1 place" : results.length ? shown : "Nothing was found.";
  }

  box.value = new URLSearchParams(location.search).get("q") ?? "";
  box.addEventListener("input", show);
  box.form.addEventListener("submit", (event) => { event.preventDefault(); show(); });
  box.focus();
  show();
})();
