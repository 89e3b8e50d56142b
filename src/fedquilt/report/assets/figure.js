// A figure: a title, a sentence, controls, a plot drawn when it comes into sight, and its numbers behind it.
const figures = new Map();
const seen = new IntersectionObserver(
  entries => {
    for (const entry of entries) {
      const figure = figures.get(entry.target.id);
      if (figure) {
        figure.near = entry.isIntersecting;
        if (figure.near && figure.stale) paint(figure);
      }
    }
  },
  { rootMargin: "250px" },
);

// parts: id, title, text, controls() -> nodes, draw() -> {data, layout, label} or a sentence why there is nothing to draw,
// numbers() -> {head, rows}, click(event)
function figure(parts) {
  const plot = el("div", { class: "plot", role: "img", "aria-label": parts.title });
  const details = el("details", { ontoggle: () => details.open && fill(figure_) }, el("summary", null, "Numbers"));
  const under = el(
    "div",
    { class: "under" },
    details,
    el(
      "button",
      { type: "button", onclick: () => saveCsv(parts), "aria-label": `${parts.title}: numbers as CSV` },
      "CSV",
    ),
    el(
      "button",
      { type: "button", onclick: () => saveSvg(figure_), "aria-label": `${parts.title}: picture as SVG` },
      "SVG",
    ),
  );
  const controls = el("div", { class: "controls" }, ...(parts.controls ? parts.controls() : []));
  const words = el("p", null, typeof parts.text === "string" ? parts.text : "");
  const node = el(
    "figure",
    { id: parts.id },
    el("figcaption", null, el("h3", null, parts.title), words),
    controls,
    plot,
    under,
  );
  const figure_ = { ...parts, node, plot, details, under, words, stale: true, near: false };
  figures.set(parts.id, figure_);
  seen.observe(node);
  return node;
}

function paint(figure) {
  figure.stale = false;
  const drawing = figure.draw();
  if (typeof figure.text === "function") figure.words.textContent = figure.text();
  const reason = typeof drawing === "string";
  figure.under.hidden = reason;
  if (reason) {
    Plotly.purge(figure.plot);
    figure.plot.replaceChildren(el("p", { class: "empty" }, drawing));
    return;
  }
  if (figure.plot.firstElementChild?.classList.contains("empty")) figure.plot.replaceChildren();
  figure.plot.setAttribute("aria-label", drawing.label);
  figure.drawing = drawing;
  Plotly.react(figure.plot, drawing.data, drawing.layout, {
    displayModeBar: false,
    responsive: true,
    doubleClick: false,
  });
  document.getElementById("js-plotly-tester")?.setAttribute("aria-hidden", "true"); // where Plotly measures text, unseen
  if (figure.click && !figure.listening) {
    figure.listening = true;
    figure.plot.on("plotly_click", figure.click);
  }
  if (figure.details.open) fill(figure);
}

// Redraw what is in sight now, the rest when it comes into sight.
function refresh(...ids) {
  for (const figure of ids.length ? ids.map(id => figures.get(id)).filter(Boolean) : figures.values()) {
    figure.stale = true;
    if (figure.near) paint(figure);
  }
}

const MOST_ROWS = 600;
function fill(figure) {
  const { head, rows } = figure.numbers();
  figure.details.replaceChildren(
    figure.details.firstElementChild,
    numbersTable(head, rows.slice(0, MOST_ROWS), figure.title),
    rows.length > MOST_ROWS
      ? el(
          "p",
          { class: "note" },
          `The first ${MOST_ROWS} of ${count(rows.length, "row")}; all of them are in the CSV.`,
        )
      : "",
  );
}
const cellText = value =>
  typeof value === "number" ? String(Number(value.toPrecision(6))) : value == null ? "–" : String(value);
function numbersTable(head, rows, title) {
  return el(
    "div",
    { class: "scroll tall", tabindex: 0, role: "region", "aria-label": `${title}: numbers` },
    el(
      "table",
      null,
      el("thead", null, el("tr", null, ...head.map(h => el("th", { scope: "col" }, h)))),
      el("tbody", null, ...rows.map(row => el("tr", null, ...row.map(cell => el("td", null, cellText(cell)))))),
    ),
  );
}

function save(name, text, type) {
  const link = el("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
function csvCell(value) {
  if (value == null || Number.isNaN(value)) return "";
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? "'" + value : String(value); // a spreadsheet must not run a name
  return /[",\n\r]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
}
function saveCsv(parts) {
  const { head, rows } = parts.numbers();
  save(`${parts.id}.csv`, [head, ...rows].map(row => row.map(csvCell).join(",")).join("\n") + "\n", "text/csv");
}
async function saveSvg(figure) {
  const { data, layout } = figure.drawing;
  const picture = await Plotly.toImage(
    {
      data,
      layout: { ...layout, showlegend: data.some(t => t.showlegend !== false && t.name), paper_bgcolor: css("--card") },
    },
    { format: "svg", width: figure.plot.clientWidth, height: layout.height },
  );
  save(`${figure.id}.svg`, decodeURIComponent(picture.replace(/^data:image\/svg\+xml,/, "")), "image/svg+xml");
}
