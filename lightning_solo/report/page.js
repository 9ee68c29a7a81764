"use strict";
// Draws the charts and makes tables sortable. Says at the end that it is done, for those who measure.
(async () => {
  const specs = JSON.parse(document.getElementById("charts").textContent);
  const options = { renderer: "svg", actions: false, mode: "vega-lite", hover: false };
  const drawn = Object.entries(specs).map(async ([name, spec]) => {
    // Vega names its place anew; the element around it has the words, and nothing is read out mark by mark.
    const place = document.querySelector(`[data-chart="${CSS.escape(name)}"]`);
    await vegaEmbed(place, spec, options);
  });
  await Promise.all(drawn);
  performance.mark("charts-drawn");
  document.documentElement.dataset.charts = String(drawn.length);
})();

for (const table of document.querySelectorAll("table[data-sortable]")) {
  table.querySelectorAll("thead th").forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = heading.textContent;
    heading.replaceChildren(button);
    button.addEventListener("click", () => sort(table, heading, column));
  });
}

function sort(table, heading, column) {
  const down = heading.getAttribute("aria-sort") === "ascending";
  for (const other of table.querySelectorAll("thead th")) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", down ? "descending" : "ascending");
  const key = (row) => row.cells[column].dataset.order;
  const rows = [...table.tBodies[0].rows];
  rows.sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === undefined || y === undefined) return (x === undefined) - (y === undefined); // what is missing comes last
    const order = isNaN(x) || isNaN(y) ? String(x).localeCompare(String(y)) : Number(x) - Number(y);
    return down ? -order : order;
  });
  table.tBodies[0].append(...rows);
}
