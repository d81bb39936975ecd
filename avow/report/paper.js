// What is folded is unfolded to be printed, and folded again. What is wider than the sheet is made as small as it takes.
const paper = document.documentElement.classList;
addEventListener("beforeprint", () => {
  paper.add("paper");
  for (const folded of document.querySelectorAll("details:not([open])")) folded.dataset.folded = folded.open = true;
  for (const wide of document.querySelectorAll(".scroll, .formula, .facts")) {
    if (wide.scrollWidth > wide.clientWidth) wide.style.zoom = wide.clientWidth / (wide.scrollWidth + 1);
  }
});
addEventListener("afterprint", () => {
  paper.remove("paper");
  for (const wide of document.querySelectorAll(".scroll, .formula, .facts")) wide.style.zoom = "";
  for (const opened of document.querySelectorAll("details[data-folded]")) {
    opened.open = false;
    delete opened.dataset.folded;
  }
});
