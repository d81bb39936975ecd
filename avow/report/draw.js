// The theme is read from the page's own colours, and again when the reader switches between light and dark. A figure is
// drawn when it comes near the window, so that a page of fifty opens at once; before printing all of them are.
const figures = JSON.parse(document.getElementById("figures").textContent), drawn = new Set();
function draw(id) {
  drawn.add(id);
  Plotly.react(id, figures[id].data, themed(figures[id].layout), {responsive: true, displayModeBar: false});
}
const near = new IntersectionObserver(seen => seen.forEach(entry => {
  if (entry.isIntersecting && !drawn.has(entry.target.id)) draw(entry.target.id);
}), {rootMargin: "800px"});
Object.keys(figures).forEach(id => near.observe(document.getElementById(id)));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach(draw));
// Figures follow the width of a window by themselves, but not that of paper.
addEventListener("beforeprint", () => Object.entries(figures).forEach(([id, figure]) => {
  const own = figure.layout, on = document.getElementById(id);
  figure.layout = {...own, width: on.clientWidth, height: on.clientHeight};
  draw(id);
  figure.layout = own;
}));
addEventListener("afterprint", () => drawn.forEach(id => { draw(id); Plotly.Plots.resize(id); }));
