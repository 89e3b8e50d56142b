// Learning: the leading metric over rounds with a band over seeds, and against the megabytes moved and virtual time.
function curveTraces(x) {
  const traces = [];
  for (const i of shown()) {
    const m = view().methods[i],
      name = escaped(scenario().methods[i].name, 40),
      colour = lineColour(i),
      at = m[x];
    if (!at) continue;
    const some = m.rounds.length > 30 ? Math.ceil(m.rounds.length / 8) : Math.max(1, Math.ceil(m.rounds.length / 10));
    if (scenario().methods[i].seeds.length > 1) {
      traces.push({
        x: [...at, ...at.slice().reverse()],
        y: scaled([...m.low, ...m.high.slice().reverse()]),
        fill: "toself",
        fillcolor: faint(colour, isDark() ? 0.26 : 0.2),
        line: { width: 0 },
        mode: "lines",
        hoverinfo: "skip",
        showlegend: false,
      });
    }
    const dots = at.map((_, k) => ((k + 2 * i) % some === 0 || at.length === 1 ? 7 : 0));
    traces.push({
      x: at,
      y: scaled(m.mean),
      name,
      mode: "lines+markers",
      line: { color: colour, width: 2.2, dash: dash(i) },
      marker: { size: dots, symbol: MARKERS[i % MARKERS.length], color: colour, opacity: 1 },
      customdata: m.rounds,
      hovertemplate:
        x === "rounds"
          ? `%{y:${format()}}${metricUnit()}`
          : `${name}<br>%{y:${format()}}${metricUnit()} after %{x:.4~g} ${x === "clock" ? "s" : "MB"}, round %{customdata}<extra></extra>`,
    });
  }
  return traces;
}
function lossTraces() {
  return shown()
    .filter(i => view().methods[i].loss)
    .map(i => {
      const m = view().methods[i];
      return {
        x: m.rounds,
        y: m.loss,
        name: escaped(scenario().methods[i].name, 40),
        mode: m.rounds.length === 1 ? "markers" : "lines",
        line: { color: lineColour(i), width: 2.2, dash: dash(i) },
        marker: { size: 7, symbol: MARKERS[i % MARKERS.length], color: lineColour(i) },
        hovertemplate: "%{y:.3f}",
      };
    });
}
// Losses that left all bounds would press all others to one line: they are cut off, and named.
function lossRange() {
  const top = view().loss_top;
  return top ? { range: [0, 1.08 * top] } : { rangemode: "tozero" };
}
function beyond(data) {
  const top = view().loss_top;
  const names = top ? data.filter(trace => trace.y.some(loss => loss > top)).map(trace => trace.name) : [];
  if (!names.length) return [];
  const text = `beyond the top: ${names.slice(0, 4).join(", ")}${names.length > 4 ? `, ${names.length - 4} more` : ""}`;
  const font = { size: 12, color: css("--soft") };
  return [{ text, font, xref: "paper", yref: "paper", x: 1, y: 1, xanchor: "right", yanchor: "top", showarrow: false }];
}
function endings() {
  return shown()
    .map(i => {
      const m = view().methods[i];
      return `${scenario().methods[i].name} ${score(m.mean[m.mean.length - 1])}${metric().percent ? " per cent" : ""}`;
    })
    .join(", ");
}
function curveNumbers() {
  const rows = [];
  for (const i of shown()) {
    const m = view().methods[i];
    m.rounds.forEach((round, k) =>
      rows.push([
        scenario().methods[i].name,
        m.reading.join(", "),
        round,
        m.mean[k],
        m.low[k],
        m.high[k],
        m.loss ? m.loss[k] : null,
        m.megabytes ? m.megabytes[k] : null,
        m.clock ? m.clock[k] : null,
      ]),
    );
  }
  const head = ["method", "read-out", "round", metric().name, "lowest seed", "highest seed", "loss", "megabytes", "virtual seconds"];
  return { head, rows };
}
const learning = () => [
  figure({
    id: "accuracy-over-rounds",
    title: `${metricName()} over rounds`,
    text: "Mean over clients. Lines: mean over seeds; bands: from the lowest to the highest seed.",
    draw() {
      const data = curveTraces("rounds");
      if (!data.length) return "No rounds have been evaluated yet.";
      return {
        data,
        label: `${metricName()} over rounds. At the end: ${endings()}.`,
        layout: layout(340, axis("round"), axis(metricAxis()), { hovermode: "x unified" }),
      };
    },
    numbers: curveNumbers,
  }),
  figure({
    id: "loss-over-rounds",
    title: "Loss over rounds",
    text: `Mean loss over clients and seeds, on the samples that ${metric().name} is measured on.`,
    draw() {
      const data = lossTraces();
      if (!data.length) return "These runs did not record losses, or predict by classes alone.";
      return {
        data,
        label: "Loss over rounds, mean over clients and seeds.",
        layout: layout(340, axis("round"), axis("loss", lossRange()), { hovermode: "x unified", annotations: beyond(data) }),
      };
    },
    numbers: curveNumbers,
  }),
  figure({
    id: "accuracy-against-megabytes",
    title: `${metricName()} against data moved`,
    text: "Megabytes sent and received by all clients together, so far.",
    draw() {
      const data = curveTraces("megabytes");
      if (!data.length) return "These runs did not record what they moved.";
      return {
        data,
        label: `${metricName()} against megabytes moved. At the end: ${endings()}.`,
        layout: layout(340, axis("megabytes, all clients", { rangemode: "tozero" }), axis(metricAxis())),
      };
    },
    numbers: curveNumbers,
  }),
  ...(view().methods.some(m => m?.clock) ? [overTime()] : []),
];
const overTime = () =>
  figure({
    id: "accuracy-over-time",
    title: `${metricName()} over virtual time`,
    text: "Seconds that rounds would take on the hardware that clients declare: receiving, training, sending, and waiting.",
    draw() {
      const data = curveTraces("clock");
      if (!data.length) return "The clients of these methods declare no hardware.";
      return {
        data,
        label: `${metricName()} over virtual time. At the end: ${endings()}.`,
        layout: layout(340, axis("virtual seconds", { rangemode: "tozero" }), axis(metricAxis())),
      };
    },
    numbers: curveNumbers,
  });

// The comparison at the top: the table as the library prints it, with signs explained below.
function comparison() {
  const table = view().table;
  if (!table) return el("p", { class: "empty" }, "No scores to compare yet.");
  const cell = ([text, bold]) => {
    const mark = text.endsWith("▲") ? "up" : text.endsWith("▼") ? "down" : null;
    const body = mark ? el("span", { class: mark }, text) : text;
    return el("td", null, bold ? el("b", null, body) : body);
  };
  return el(
    "figure",
    { id: "comparison" },
    el(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": "Comparison of methods" },
      el(
        "table",
        null,
        el(
          "thead",
          null,
          el("tr", null, ...table.headings.map(h => el("th", { scope: "col" }, h.replace(/ %/g, "\u00a0%")))),
        ),
        el("tbody", null, ...table.rows.map(row => el("tr", null, ...row.map(cell)))),
      ),
    ),
    el("p", { class: "note" }, table.notes.join(" ")),
    el(
      "div",
      { class: "under" },
      ...[
        ["CSV", "csv", "text/csv"],
        ["LaTeX", "latex", "text/x-tex"],
        ["Markdown", "markdown", "text/markdown"],
      ].map(([name, key, type]) =>
        el(
          "button",
          {
            type: "button",
            "aria-label": `Comparison as ${name}`,
            onclick: () => save(`comparison.${{ csv: "csv", latex: "tex", markdown: "md" }[key]}`, table[key], type),
          },
          name,
        ),
      ),
    ),
  );
}

function facts() {
  const now = view().methods,
    best = view().table?.best;
  const rounds = Math.max(0, ...now.filter(Boolean).map(m => m.rounds[m.rounds.length - 1]));
  const seeds = new Set(scenario().methods.flatMap(m => m.seeds)).size;
  const fact = (name, value, small) =>
    el("div", null, el("dt", null, name), el("dd", null, String(value), small ? el("small", null, " " + small) : ""));
  const lone = ["local", "alone"].includes(best?.name); // the bar itself: it gains nothing over itself
  return el(
    "dl",
    { class: "facts" },
    best ? fact(metric().name === "accuracy" ? "Most accurate" : `Best ${metric().name}`, best.name, score(best.score) + metricUnit()) : "",
    best && best.gaining !== null && !lone
      ? fact("Clients it helps", Math.round(100 * best.gaining) + " %", "over alone")
      : "",
    fact("Clients", scenario().clients.length.toLocaleString("en-GB")),
    fact("Rounds", rounds.toLocaleString("en-GB"), count(seeds, "seed")),
  );
}

// All settings that a sweep tried, by what they reach on validation data; what was chosen is filled.
const settingsTried = () =>
  figure({
    id: "settings-tried",
    title: "Settings tried",
    text: "On validation data: mean over clients and seeds, bars: standard deviation over seeds. Filled: chosen.",
    draw() {
      const rows = state.data.tried;
      return {
        data: [
          {
            y: rows.map(r => `${r.method} ${r.settings}`),
            x: scaled(rows.map(r => r.score)),
            error_x: { type: "data", array: scaled(rows.map(r => r.deviation ?? 0)), thickness: 1.4 },
            mode: "markers",
            marker: {
              size: 10,
              color: lineColour(0),
              symbol: rows.map(r => (r.chosen ? "circle" : "circle-open")),
            },
            hovertemplate: `%{y}: %{x:${format()}}${metricUnit()}<extra></extra>`,
          },
        ],
        label: `Settings tried: ${rows.map(r => `${r.method} ${r.settings} ${score(r.score)}${metric().percent ? " per cent" : ""}`).join(", ")}.`,
        layout: layout(120 + 26 * rows.length, axis(`${metricAxis()}, on validation data`), {
          ...axis(""),
          autorange: "reversed",
          automargin: true,
          type: "category",
        }),
      };
    },
    numbers: () => ({
      head: ["method", "settings", `${metric().name} on validation data`, "standard deviation", "chosen"],
      rows: state.data.tried.map(r => [r.method, r.settings, r.score, r.deviation, r.chosen ? "yes" : "no"]),
    }),
  });
