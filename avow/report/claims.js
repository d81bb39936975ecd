// Shows the claims of a topic and of the verdicts that are pressed.
const topic = document.getElementById("topic"), verdicts = [...document.querySelectorAll("button[data-verdict]")];
const kept = document.getElementById("kept");
function filter() {
  const wanted = verdicts.filter(b => b.ariaPressed === "true").map(b => b.dataset.verdict);
  let count = 0;
  for (const item of document.querySelectorAll("[data-topic]")) {
    const seen = (!topic.value || item.dataset.topic === topic.value)
      && (!wanted.length || wanted.includes(item.dataset.verdict));
    item.hidden = !seen;
    count += seen && item.tagName === "ARTICLE";
  }
  for (const section of document.querySelectorAll("section"))
    section.hidden = !section.querySelector("article:not([hidden])");
  kept.textContent = count + (count === 1 ? " claim" : " claims");
}
const unfold = () => document.querySelectorAll("details").forEach(details => details.open = true);
document.getElementById("unfold").addEventListener("click", unfold);
topic.addEventListener("change", filter);
verdicts.forEach(b => b.addEventListener("click", () => {
  b.ariaPressed = b.ariaPressed === "true" ? "false" : "true";
  filter();
}));
filter();
