// A part of a page is found by the beginnings of words in its heading, its text, or the title of its page. Parts that have
// every word of the query come alone; if there are none, those that have the most.
(() => {
  const MOST = 40, AROUND = 90;
  const pages = JSON.parse(document.getElementById("index").textContent);
  const box = document.querySelector(".search.large input");
  const list = document.getElementById("results"), found = document.getElementById("found");
  const IDLE = new Set(("a an and any are as at be by can do does for from how i in is it its me much my of on one or own "
    + "own should so that the this to use using what when which with").split(" "));
  // What readers type, and what the pages say.
  const SAME = {
    kv: "key-value|key value|keyvalue", bf16: "bfloat16", fp16: "float16", half: "float16", fp32: "float32",
    quantized: "quantis", quantization: "quantis", latency: "time", speed: "fast|time|speed", validation: "held",
    custom: "own", write: "write|own", api: "reference|parameter", argument: "parameter|argument", seqlen: "length",
    finetune: "fine-tun|finetun", "fine-tune": "fine-tun|finetun",
  };

  const escaped = (word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  const stem = (word) => word.length > 5 ? word.replace(/(ing|ed|es|e|s)$/, "") : word.length > 3 ? word.replace(/s$/, "") : word;
  const said = (word) => SAME[word.toLowerCase()] ?? SAME[stem(word.toLowerCase())] ?? escaped(stem(word));
  const starting = (word) => new RegExp(`(?<![\\p{L}\\p{N}])(?:${said(word)})`, "iu");
  const named = (text) => text.toLowerCase().replace(/\s+/g, " ").trim();

  function wanted(query) {
    const words = query.replace(/[()"?!,;]+/g, " ").split(/\s+/).filter(Boolean);
    const telling = words.filter((word) => !IDLE.has(word.toLowerCase()));
    return telling.length ? telling : words;
  }

  function search(words) {
    const patterns = words.map(starting), whole = named(words.join(" "));
    const results = [], counts = patterns.map(() => 1);
    for (const [title, address, parts] of pages) {
      for (const [anchor, heading, text] of parts) {
        const here = patterns.map((one) => (one.test(heading) ? 6 : 0) + (one.test(text) ? 1 : 0));
        const points = patterns.map((one, i) => here[i] + (one.test(title) ? 2 : 0));
        here.forEach((found, i) => { counts[i] += found > 0; });
        // What only the title of the page says is found once, at its beginning.
        if (points.some(Boolean) && (heading === title || here.some(Boolean))) {
          const exact = [named(heading), named(`${title}.${heading}`)].includes(whole);
          const link = anchor ? `${address}#${anchor}` : address;
          results.push({ title, heading, text, points, exact, link, has: points.filter(Boolean).length });
        }
      }
    }
    // Rare words tell more.
    const score = ({ points, exact }) => points.reduce((sum, one, i) => sum + one / Math.log(1 + counts[i]), exact ? 40 : 0);
    const most = Math.max(0, ...results.map((one) => one.has));
    const best = results.filter((one) => one.has === most).map((one) => ({ ...one, score: score(one) }));
    return { all: most === words.length, results: best.sort((a, b) => b.score - a.score) };
  }

  function excerpt(text, words) {
    const pattern = new RegExp(`(?<![\\p{L}\\p{N}])(?:${words.map(said).join("|")})`, "giu");
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
    const words = wanted(box.value), { all, results } = search(words);
    list.replaceChildren(...results.slice(0, MOST).map(({ title, heading, text, link }) => {
      const item = document.createElement("li"), anchor = document.createElement("a");
      anchor.href = link;
      anchor.textContent = heading === title ? title : `${title}: ${heading}`;
      item.append(anchor, excerpt(text, words));
      return item;
    }));
    const shown = results.length > MOST ? `the first ${MOST} of ${results.length} places` : `${results.length} places`;
    const places = results.length === 1 ? "1 place" : shown;
    const some = all ? places : `No place has all of these words; ${places} with most of them`;
    found.textContent = !words.length ? "" : results.length ? some : "Nothing was found.";
  }

  box.value = new URLSearchParams(location.search).get("q") ?? "";
  box.addEventListener("input", show);
  box.form.addEventListener("submit", (event) => { event.preventDefault(); show(); });
  box.focus();
  show();
})();
