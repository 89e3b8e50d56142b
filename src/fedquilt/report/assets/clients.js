// Clients: how accuracy is spread over them, what each gains over training alone, one client in depth, who moved what.
const methodNames = () => scenario().methods.map(m => m.name);
const finals = i => view().methods[i] && unpack(view().methods[i].final);

function spread() {
  return figure({ id: "spread-over-clients", title: "Accuracy of each client",
    text: "One dot a client (mean over seeds); box: quartiles and median.",
    draw() {
      const rows = shown();
      if (!rows.length) return "No accuracies yet.";
      const data = rows.map((i, k) => {
        const values = Array.from(finals(i)), known = values.map((v, c) => c).filter(c => !Number.isNaN(values[c]));
        return { type: "box", orientation: "h", x: known.map(c => 100 * values[c]), y: known.map(() => rows.length - 1 - k),
          name: escaped(scenario().methods[i].name, 40), text: known.map(c => escaped(scenario().clients[c])), boxpoints: "all", jitter: 0.75, pointpos: 0,
          line: { color: lineColour(i), width: 1.5 }, fillcolor: faint(lineColour(i), 0.12), width: 0.62,
          marker: { color: faint(lineColour(i), known.length > 150 ? 0.35 : 0.6), size: known.length > 150 ? 3.5 : 5.5, symbol: MARKERS[i % MARKERS.length] },
          hoveron: "points", hovertemplate: "%{text}<br>%{x:.1f} %<extra></extra>" };
      });
      const middle = i => median(Array.from(finals(i)).filter(v => !Number.isNaN(v)));
      return { data, label: "Spread of accuracy over clients. Medians: " + rows.map(i => `${methodNames()[i]} ${percent(middle(i))}`).join(", ") + ".",
        layout: layout(Math.max(300, 70 + 62 * rows.length), axis("accuracy, %"),
          axis("", { tickvals: rows.map((_, k) => rows.length - 1 - k), ticktext: rows.map(i => escaped(methodNames()[i], phone() ? 12 : 22)), gridcolor: "rgba(0,0,0,0)" })) };
    },
    numbers() {
      const rows = shown();
      return { head: ["client", ...rows.map(i => methodNames()[i])],
        rows: scenario().clients.map((c, k) => [c, ...rows.map(i => finals(i)[k])]) };
    } });
}

function gains() {
  const mine = () => view().methods[state.gain] && unpack(view().methods[state.gain].gain);
  const sorted = () => Array.from(mine()).map((g, c) => [g, c]).filter(([g]) => !Number.isNaN(g)).sort((a, b) => a[0] - b[0]);
  return figure({ id: "gain-over-alone", title: "Each client's gain over alone",
    text: "Points of accuracy above (or below) what the same client reaches by itself, from the greatest loss to the greatest gain.",
    controls: () => [choice("Method", methodNames(), state.gain, i => { state.gain = i; refresh("gain-over-alone"); })],
    draw() {
      if (!mine()) return "What this method's clients reach alone is not known: run the method 'local' with the same seeds.";
      const all = sorted(), gaining = all.filter(([g]) => g > 1e-9).length, losing = all.filter(([g]) => g < -1e-9).length;
      const text = `${gaining} of ${count(all.length, "client")} gain, ${losing} lose`;
      const bars = (part, colour, name) => ({ type: "bar", name, x: part.map(([, , k]) => k), y: part.map(([g]) => 100 * g), marker: { color: colour },
        customdata: part.map(([, c]) => c), text: part.map(([, c]) => escaped(scenario().clients[c])), textposition: "none",
        hovertemplate: "%{text}<br>%{y:+.1f} points<extra></extra>" });
      const ranked = all.map(([g, c], k) => [g, c, k + 1]);
      return { data: [bars(ranked.filter(([g]) => g >= 0), lineColour(0), "gain"), bars(ranked.filter(([g]) => g < 0), lineColour(1), "loss")],
        label: `Gain over alone with ${methodNames()[state.gain]}: ${text}.`,
        layout: layout(Math.max(300, 20 + 62 * shown().length), axis(`clients: ${text}`, { showticklabels: false, showgrid: false, ticks: "" }),
          axis("points over alone", { zeroline: true, zerolinecolor: css("--soft") }), { bargap: all.length > 120 ? 0 : 0.18, barmode: "overlay" }) };
    },
    click: event => { pickClient(event.points[0].customdata, state.gain); },
    numbers: () => ({ head: ["client", `gain of ${methodNames()[state.gain]} over alone`], rows: sorted().map(([g, c]) => [scenario().clients[c], g]) }) });
}

const CLIENT_FIGURES = ["client-over-rounds", "client-classes", "client-confusion"];
function pickClient(client, method) {
  state.client = client;
  if (method != null) state.detail = method;
  const selects = document.querySelectorAll("#one-client-picks select");
  if (selects.length) { selects[0].value = state.detail; selects[1].value = client; }
  refresh(...CLIENT_FIGURES, "circles");
  say(`Showing client ${scenario().clients[client]} with ${methodNames()[state.detail]}`);
}
function clientPicks() {
  const ranked = k => {
    const values = finals(state.detail);
    if (!values) return;
    const order = Array.from(values.keys()).filter(c => !Number.isNaN(values[c])).sort((a, b) => values[a] - values[b]);
    pickClient(order[Math.round(k * (order.length - 1))]);
  };
  const jump = (name, k) => el("button", { type: "button", onclick: () => ranked(k) }, name);
  return el("div", { class: "controls", id: "one-client-picks" },
    choice("Method", methodNames(), state.detail, i => pickClient(state.client, i)),
    choice("Client", scenario().clients, state.client, c => pickClient(c)),
    jump("Lowest", 0), jump("Median", 0.5), jump("Highest", 1));
}
const detail = () => scenario().details[state.detail];
const labelName = i => scenario().labels[i] ?? String(i);
function history(i) {
  const d = scenario().details[i];
  if (!d.history) return null;
  const all = unpack(d.history), n = d.rounds.length;
  return Array.from(all.subarray(state.client * n, (state.client + 1) * n), v => v === 65535 ? null : v / 65534);
}
function measures() {
  if (!detail().f) return null;
  const classes = detail().f.shape[1];
  return Array.from(unpack(detail().f).subarray(state.client * classes, (state.client + 1) * classes));
}
function confusion() {
  const d = detail().confusion;
  if (!d) return null;
  const offsets = unpack(d.offsets), places = unpack(d.places), counts = unpack(d.counts);
  const matrix = Array.from({ length: d.classes }, () => new Array(d.classes).fill(0));
  for (let k = offsets[state.client]; k < offsets[state.client + 1]; k++) matrix[Math.floor(places[k] / d.classes)][places[k] % d.classes] = counts[k];
  return matrix;
}
const oneClient = () => [
  figure({ id: "client-over-rounds", title: "Accuracy over rounds", text: "This client under each method, mean over seeds.",
    draw() {
      const data = scenario().methods.map((m, i) => i).filter(i => !state.hidden.has(i) && history(i)).map(i => ({ x: scenario().details[i].rounds, y: scaled(history(i)),
        name: escaped(methodNames()[i], 40), mode: scenario().details[i].rounds.length > 1 ? "lines" : "markers",
        line: { color: lineColour(i), width: i === state.detail ? 2.8 : 1.4, dash: dash(i) }, opacity: i === state.detail ? 1 : 0.65, hovertemplate: "%{y:.1f} %" }));
      if (!data.length) return "No rounds have been evaluated yet.";
      return { data, label: `Accuracy of client ${scenario().clients[state.client]} over rounds.`,
        layout: layout(300, axis("round"), axis("accuracy, %"), { hovermode: "x unified" }) };
    },
    numbers() {
      const rows = [];
      scenario().methods.forEach((m, i) => history(i)?.forEach((a, k) => rows.push([scenario().clients[state.client], m.name, scenario().details[i].rounds[k], a])));
      return { head: ["client", "method", "round", "accuracy"], rows };
    } }),
  figure({ id: "client-classes", title: "F-measure of each class", text: "At the end of the run. A class this client has no samples of is left blank.",
    draw() {
      const f = measures();
      if (!f || f.every(Number.isNaN)) return "These runs did not record F-measures by class.";
      return { data: [{ type: "bar", orientation: "h", y: f.map((_, i) => i), x: f.map(v => Number.isNaN(v) ? null : v), marker: { color: lineColour(state.detail) },
        text: f.map(v => Number.isNaN(v) ? "" : v.toFixed(2)), textposition: "outside", cliponaxis: false, hovertemplate: "%{x:.3f}<extra></extra>" }],
        label: `F-measure of each class for client ${scenario().clients[state.client]}: ` + f.map((v, i) => `${labelName(i)} ${Number.isNaN(v) ? "none" : v.toFixed(2)}`).join(", "),
        layout: layout(Math.max(300, 60 + 22 * f.length), axis("F-measure", { range: [0, 1.08], tickvals: [0, 0.25, 0.5, 0.75, 1] }),
          axis("", { autorange: "reversed", tickvals: f.map((_, i) => i), ticktext: f.map((_, i) => escaped(labelName(i), phone() ? 12 : 18)), gridcolor: "rgba(0,0,0,0)" }), { bargap: 0.3 }) };
    },
    numbers: () => ({ head: ["client", "method", "class", "F-measure"],
      rows: measures().map((v, i) => [scenario().clients[state.client], methodNames()[state.detail], labelName(i), v]) }) }),
  figure({ id: "client-confusion", title: "Confusion", text: "Rows: true class; columns: predicted class; counts on the test split, summed over seeds.",
    draw() {
      const matrix = confusion();
      if (!matrix) return "These runs did not record a confusion matrix.";
      const n = matrix.length, names = matrix.map((_, i) => escaped(labelName(i), phone() ? 8 : 14));
      const share = matrix.map(row => { const total = row.reduce((a, b) => a + b, 0); return row.map(v => total ? v / total : null); });
      const ends = isDark() ? ["#191f24", "#7cc4ee"] : ["#ffffff", "#0b5c8c"];
      return { data: [{ type: "heatmap", z: share, customdata: matrix, zmin: 0, zmax: 1, showscale: false, xgap: n < 26 ? 1 : 0, ygap: n < 26 ? 1 : 0,
        colorscale: [[0, ends[0]], [1, ends[1]]], text: matrix.map(row => row.map(v => v ? String(v) : "")), texttemplate: n <= 12 ? "%{text}" : "", x: matrix.map((_, i) => i), y: matrix.map((_, i) => i),
        hovertemplate: "%{customdata} samples of true class %{y} predicted as %{x}<extra></extra>" }],
        label: `Confusion of client ${scenario().clients[state.client]}: ${matrix.reduce((a, row, i) => a + row[i], 0)} of ${matrix.flat().reduce((a, b) => a + b, 0)} samples right.`,
        layout: layout(Math.max(300, Math.min(560, 90 + 26 * n)), axis("predicted", { tickvals: matrix.map((_, i) => i), ticktext: names, showgrid: false, tickangle: names.some(x => x.length > 3) ? -40 : 0 }),
          axis("true", { autorange: "reversed", tickvals: matrix.map((_, i) => i), ticktext: names, showgrid: false })) };
    },
    numbers() {
      const rows = [];
      confusion().forEach((row, i) => row.forEach((n, j) => n && rows.push([scenario().clients[state.client], methodNames()[state.detail], labelName(i), labelName(j), n])));
      return { head: ["client", "method", "true", "predicted", "samples"], rows };
    } }),
];

function movers() {
  const mine = () => scenario().traffic[state.moved];
  const sorted = () => {
    const up = unpack(mine().up), down = unpack(mine().down);
    return Array.from(up, (v, c) => [c, v, down[c]]).sort((a, b) => b[1] + b[2] - a[1] - a[2]);
  };
  return figure({ id: "data-moved", title: "Who moved how much data", text: "Megabytes each client sent and received in the whole run, mean over seeds, most first.",
    controls: () => [choice("Method", methodNames(), state.moved, i => { state.moved = i; refresh("data-moved"); })],
    draw() {
      if (!mine()) return "This method's runs did not record what they moved.";
      const all = sorted(), names = all.map(([c]) => escaped(scenario().clients[c])), x = all.map((_, k) => k);
      const sum = k => all.reduce((a, row) => a + row[k], 0);
      if (!(sum(1) + sum(2))) return "Nothing was moved: every unit is private.";
      const bars = (k, name, colour) => ({ type: "bar", x, y: all.map(row => row[k]), name, marker: { color: colour }, text: names, textposition: "none",
        hovertemplate: `%{text}<br>${name} %{y:.4~g} MB<extra></extra>` });
      const few = all.length <= (phone() ? 12 : 40);
      return { data: [bars(1, "sent", lineColour(0)), bars(2, "received", faint(lineColour(0), 0.4))],
        label: `Data moved with ${methodNames()[state.moved]}: ${amount(sum(1))} megabytes sent and ${amount(sum(2))} received by ${count(all.length, "client")}.`,
        layout: layout(320, axis(few ? "" : count(all.length, "client") + ", most first", { showgrid: false, tickvals: few ? x : [], ticktext: few ? names.map(n => n.slice(0, 16)) : [], tickangle: -45 }),
          axis("megabytes"), { barmode: "stack", bargap: few ? 0.25 : 0, showlegend: true, legend: { orientation: "h", x: 1, xanchor: "right", y: 1.12 }, margin: { l: 46, r: 12, t: 30, b: 42 } }) };
    },
    numbers: () => ({ head: ["client", "MB sent", "MB received"], rows: mine() ? sorted().map(([c, up, down]) => [scenario().clients[c], up, down]) : [] }) });
}
