// One client in depth: its accuracy over rounds, its F-measures by class, its confusion.
const CLIENT_FIGURES = ["client-over-rounds", "client-classes", "client-confusion"];
function pickClient(client, method) {
  state.client = client;
  if (method != null) state.detail = method;
  const selects = document.querySelectorAll("#one-client-picks select");
  if (selects.length) {
    selects[0].value = state.detail;
    selects[1].value = client;
  }
  refresh(...CLIENT_FIGURES, "circles");
  say(`Showing client ${scenario().clients[client]} with ${methodNames()[state.detail]}`);
}
function clientPicks() {
  const ranked = k => {
    const values = finals(state.detail);
    if (!values) return;
    const order = Array.from(values.keys())
      .filter(c => !Number.isNaN(values[c]))
      .sort((a, b) => values[a] - values[b]);
    pickClient(order[Math.round(k * (order.length - 1))]);
  };
  const jump = (name, k) => el("button", { type: "button", onclick: () => ranked(k) }, name);
  return el(
    "div",
    { class: "controls", id: "one-client-picks" },
    choice("Method", methodNames(), state.detail, i => pickClient(state.client, i)),
    choice("Client", scenario().clients, state.client, c => pickClient(c)),
    jump("Lowest", 0),
    jump("Median", 0.5),
    jump("Highest", 1),
  );
}
const detail = () => scenario().details[state.detail];
const labelName = i => scenario().labels[i] ?? String(i);
function history(i) {
  const d = scenario().details[i];
  if (!d.history) return null;
  const all = unpack(d.history),
    n = d.rounds.length;
  return Array.from(all.subarray(state.client * n, (state.client + 1) * n), v =>
    d.history.type === "f4" ? v : v === 65535 ? null : v / 65534,
  );
}
function measures() {
  if (!detail().f) return null;
  const classes = detail().f.shape[1];
  return Array.from(unpack(detail().f).subarray(state.client * classes, (state.client + 1) * classes));
}
function confusion() {
  const d = detail().confusion;
  if (!d) return null;
  const offsets = unpack(d.offsets),
    places = unpack(d.places),
    counts = unpack(d.counts);
  const matrix = Array.from({ length: d.classes }, () => new Array(d.classes).fill(0));
  for (let k = offsets[state.client]; k < offsets[state.client + 1]; k++)
    matrix[Math.floor(places[k] / d.classes)][places[k] % d.classes] = counts[k];
  return matrix;
}
const overRounds = () =>
  figure({
    id: "client-over-rounds",
    title: `${metricName()} over rounds`,
    text: "This client under each method, mean over seeds.",
    draw() {
      const data = scenario()
        .methods.map((m, i) => i)
        .filter(i => !state.hidden.has(i) && history(i))
        .map(i => ({
          x: scenario().details[i].rounds,
          y: scaled(history(i)),
          name: escaped(methodNames()[i], 40),
          mode: scenario().details[i].rounds.length > 1 ? "lines" : "markers",
          line: { color: lineColour(i), width: i === state.detail ? 2.8 : 1.4, dash: dash(i) },
          opacity: i === state.detail ? 1 : 0.65,
          hovertemplate: `%{y:${format()}}${metricUnit()}`,
        }));
      if (!data.length) return "No rounds have been evaluated yet.";
      return {
        data,
        label: `${metricName()} of client ${scenario().clients[state.client]} over rounds.`,
        layout: layout(300, axis("round"), axis(metricAxis()), { hovermode: "x unified" }),
      };
    },
    numbers() {
      const rows = [];
      scenario().methods.forEach((m, i) =>
        history(i)?.forEach((a, k) =>
          rows.push([scenario().clients[state.client], m.name, scenario().details[i].rounds[k], a]),
        ),
      );
      return { head: ["client", "method", "round", metric().name], rows };
    },
  });
const classMeasures = () =>
  figure({
    id: "client-classes",
    title: "F-measure of each class",
    text: "At the end of the run. A class this client has no samples of is left blank.",
    draw() {
      const f = measures();
      if (!f || f.every(Number.isNaN)) return "These runs did not record F-measures by class.";
      return {
        data: [
          {
            type: "bar",
            orientation: "h",
            y: f.map((_, i) => i),
            x: f.map(v => (Number.isNaN(v) ? null : v)),
            marker: { color: lineColour(state.detail) },
            text: f.map(v => (Number.isNaN(v) ? "" : v.toFixed(2))),
            textposition: "outside",
            cliponaxis: false,
            hovertemplate: "%{x:.3f}<extra></extra>",
          },
        ],
        label:
          `F-measure of each class for client ${scenario().clients[state.client]}: ` +
          f.map((v, i) => `${labelName(i)} ${Number.isNaN(v) ? "none" : v.toFixed(2)}`).join(", "),
        layout: layout(
          Math.max(300, 60 + 22 * f.length),
          axis("F-measure", { range: [0, 1.08], tickvals: [0, 0.25, 0.5, 0.75, 1] }),
          axis("", {
            autorange: "reversed",
            tickvals: f.map((_, i) => i),
            ticktext: f.map((_, i) => escaped(labelName(i), phone() ? 12 : 18)),
            gridcolor: "rgba(0,0,0,0)",
          }),
          { bargap: 0.3 },
        ),
      };
    },
    numbers: () => ({
      head: ["client", "method", "class", "F-measure"],
      rows: measures().map((v, i) => [scenario().clients[state.client], methodNames()[state.detail], labelName(i), v]),
    }),
  });
const classConfusion = () =>
  figure({
    id: "client-confusion",
    title: "Confusion",
    text: "Rows: true class; columns: predicted class; counts on the test split, summed over seeds.",
    draw() {
      const matrix = confusion();
      if (!matrix) return "These runs did not record a confusion matrix.";
      const n = matrix.length,
        names = matrix.map((_, i) => escaped(labelName(i), phone() ? 8 : 14));
      const share = matrix.map(row => {
        const total = row.reduce((a, b) => a + b, 0);
        return row.map(v => (total ? v / total : null));
      });
      const ends = isDark() ? ["#191f24", "#7cc4ee"] : ["#ffffff", "#0b5c8c"];
      return {
        data: [
          {
            type: "heatmap",
            z: share,
            customdata: matrix,
            zmin: 0,
            zmax: 1,
            showscale: false,
            xgap: n < 26 ? 1 : 0,
            ygap: n < 26 ? 1 : 0,
            colorscale: [
              [0, ends[0]],
              [1, ends[1]],
            ],
            text: matrix.map(row => row.map(v => (v ? String(v) : ""))),
            texttemplate: n <= 12 ? "%{text}" : "",
            x: matrix.map((_, i) => i),
            y: matrix.map((_, i) => i),
            hovertemplate: "%{customdata} samples of true class %{y} predicted as %{x}<extra></extra>",
          },
        ],
        label: `Confusion of client ${scenario().clients[state.client]}: ${matrix.reduce((a, row, i) => a + row[i], 0)} of ${matrix.flat().reduce((a, b) => a + b, 0)} samples right.`,
        layout: layout(
          Math.max(300, Math.min(560, 90 + 26 * n)),
          axis("predicted", {
            tickvals: matrix.map((_, i) => i),
            ticktext: names,
            showgrid: false,
            tickangle: names.some(x => x.length > 3) ? -40 : 0,
          }),
          axis("true", { autorange: "reversed", tickvals: matrix.map((_, i) => i), ticktext: names, showgrid: false }),
        ),
      };
    },
    numbers() {
      const rows = [];
      confusion().forEach((row, i) =>
        row.forEach(
          (n, j) =>
            n &&
            rows.push([scenario().clients[state.client], methodNames()[state.detail], labelName(i), labelName(j), n]),
        ),
      );
      return { head: ["client", "method", "true", "predicted", "samples"], rows };
    },
  });
// where there are no classes nothing can be taken for another
const oneClient = () => [overRounds(), ...(scenario().classes ? [classMeasures(), classConfusion()] : [])];
