// What is folded is unfolded to be printed, and folded again.
const paper = document.documentElement.classList;
addEventListener("beforeprint", () => {
  paper.add("paper");
  for (const folded of document.querySelectorAll("details:not([open])")) folded.dataset.folded = folded.open = true;
});
addEventListener("afterprint", () => {
  paper.remove("paper");
  for (const opened of document.querySelectorAll("details[data-folded]")) {
    opened.open = false;
    delete opened.dataset.folded;
  }
});
