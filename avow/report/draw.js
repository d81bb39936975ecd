// Draws a report's figures, each in the element of its id.
const figures = JSON.parse(document.getElementById("figures").textContent);
for (const [id, figure] of Object.entries(figures)) draw(document.getElementById(id), figure);
