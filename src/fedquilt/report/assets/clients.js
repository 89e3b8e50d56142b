// Clients: how accuracy is spread over them, what each gains over training alone, who moved how much.
const methodNames = () => scenario().methods.map(m => m.name);
const finals = i => view().methods[i] && unpack(view().methods[i].final);

function spread() {
  return figure({
    id: "spread-over-clients",
    title: `${metricName()} of each client`,
    text: "One dot a client (mean over seeds); box: quartiles and median.",
    draw() {
      const rows = shown();
      if (!rows.length) return "No scores yet.";
      const data = rows.map((i, k) => {
        const values = Array.from(finals(i)),
          known = values.map((v, c) => c).filter(c => !Number.isNaN(values[c]));
        return {
          type: "box",
          orientation: "h",
          x: known.map(c => factor() * values[c]),
          y: known.map(() => rows.length - 1 - k),
          name: escaped(scenario().methods[i].name, 40),
          text: known.map(c => escaped(scenario().clients[c])),
          boxpoints: "all",
          jitter: 0.75,
          pointpos: 0,
          line: { color: lineColour(i), width: 1.5 },
          fillcolor: faint(lineColour(i), 0.12),
          width: 0.62,
          marker: {
            color: faint(lineColour(i), known.length > 150 ? 0.35 : 0.6),
            size: known.length > 150 ? 3.5 : 5.5,
            symbol: MARKERS[i % MARKERS.length],
          },
          hoveron: "points",
          hovertemplate: `%{text}<br>%{x:${format()}}${metricUnit()}<extra></extra>`,
        };
      });
      const middle = i => median(Array.from(finals(i)).filter(v => !Number.isNaN(v)));
      return {
        data,
        label:
          `Spread of ${metric().name} over clients. Medians: ` +
          rows.map(i => `${methodNames()[i]} ${score(middle(i))}`).join(", ") +
          ".",
        layout: layout(
          Math.max(300, 70 + 62 * rows.length),
          axis(metricAxis()),
          axis("", {
            tickvals: rows.map((_, k) => rows.length - 1 - k),
            ticktext: rows.map(i => escaped(methodNames()[i], phone() ? 12 : 22)),
            gridcolor: "rgba(0,0,0,0)",
          }),
        ),
      };
    },
    numbers() {
      const rows = shown();
      return {
        head: ["client", ...rows.map(i => methodNames()[i])],
        rows: scenario().clients.map((c, k) => [c, ...rows.map(i => finals(i)[k])]),
      };
    },
  });
}

function gains() {
  const mine = () => view().methods[state.gain] && unpack(view().methods[state.gain].gain);
  const sorted = () =>
    Array.from(mine())
      .map((g, c) => [g, c])
      .filter(([g]) => !Number.isNaN(g))
      .sort((a, b) => a[0] - b[0]);
  return figure({
    id: "gain-over-alone",
    title: "Each client's gain over alone",
    text: `${metric().percent ? "Points of " : ""}${metric().name} better (or worse) than what the same client reaches by itself, from the greatest loss to the greatest gain.`,
    controls: () => [
      choice("Method", methodNames(), state.gain, i => {
        state.gain = i;
        refresh("gain-over-alone");
      }),
    ],
    draw() {
      if (!mine())
        return "What this method's clients reach alone is not known: run the method 'local' with the same seeds.";
      const all = sorted(),
        gaining = all.filter(([g]) => g > 1e-9).length,
        losing = all.filter(([g]) => g < -1e-9).length;
      const text = `${gaining} of ${count(all.length, "client")} gain, ${losing} lose`;
      const bars = (part, colour, name) => ({
        type: "bar",
        name,
        x: part.map(([, , k]) => k),
        y: part.map(([g]) => factor() * g),
        marker: { color: colour },
        customdata: part.map(([, c]) => c),
        text: part.map(([, c]) => escaped(scenario().clients[c])),
        textposition: "none",
        hovertemplate: `%{text}<br>%{y:${format("+")}}${metric().percent ? " points" : ""}<extra></extra>`,
      });
      const ranked = all.map(([g, c], k) => [g, c, k + 1]);
      return {
        data: [
          bars(
            ranked.filter(([g]) => g >= 0),
            lineColour(0),
            "gain",
          ),
          bars(
            ranked.filter(([g]) => g < 0),
            lineColour(1),
            "loss",
          ),
        ],
        label: `Gain over alone with ${methodNames()[state.gain]}: ${text}.`,
        layout: layout(
          Math.max(300, 20 + 62 * shown().length),
          axis(`clients: ${text}`, { showticklabels: false, showgrid: false, ticks: "" }),
          axis(metric().percent ? "points over alone" : "gain over alone", { zeroline: true, zerolinecolor: css("--soft") }),
          { bargap: all.length > 120 ? 0 : 0.18, barmode: "overlay" },
        ),
      };
    },
    click: event => {
      pickClient(event.points[0].customdata, state.gain);
    },
    numbers: () => ({
      head: ["client", `gain of ${methodNames()[state.gain]} over alone`],
      rows: sorted().map(([g, c]) => [scenario().clients[c], g]),
    }),
  });
}

function movers() {
  const mine = () => scenario().traffic[state.moved];
  const sorted = () => {
    const up = unpack(mine().up),
      down = unpack(mine().down);
    return Array.from(up, (v, c) => [c, v, down[c]]).sort((a, b) => b[1] + b[2] - a[1] - a[2]);
  };
  return figure({
    id: "data-moved",
    title: "Who moved how much data",
    text: "Megabytes each client sent and received in the whole run, mean over seeds, most first.",
    controls: () => [
      choice("Method", methodNames(), state.moved, i => {
        state.moved = i;
        refresh("data-moved");
      }),
    ],
    draw() {
      if (!mine()) return "This method's runs did not record what they moved.";
      const all = sorted(),
        names = all.map(([c]) => escaped(scenario().clients[c])),
        x = all.map((_, k) => k);
      const sum = k => all.reduce((a, row) => a + row[k], 0);
      if (!(sum(1) + sum(2))) return "Nothing was moved: every unit is private.";
      const bars = (k, name, colour) => ({
        type: "bar",
        x,
        y: all.map(row => row[k]),
        name,
        marker: { color: colour },
        text: names,
        textposition: "none",
        hovertemplate: `%{text}<br>${name} %{y:.4~g} MB<extra></extra>`,
      });
      const few = all.length <= (phone() ? 12 : 40);
      return {
        data: [bars(1, "sent", lineColour(0)), bars(2, "received", faint(lineColour(0), 0.4))],
        label: `Data moved with ${methodNames()[state.moved]}: ${amount(sum(1))} megabytes sent and ${amount(sum(2))} received by ${count(all.length, "client")}.`,
        layout: layout(
          320,
          axis(few ? "" : count(all.length, "client") + ", most first", {
            showgrid: false,
            tickvals: few ? x : [],
            ticktext: few ? all.map(([c]) => escaped(scenario().clients[c], 16)) : [],
            tickangle: -45,
          }),
          axis("megabytes"),
          {
            barmode: "stack",
            bargap: few ? 0.25 : 0,
            showlegend: true,
            legend: { orientation: "h", x: 1, xanchor: "right", y: 1.12 },
            margin: { l: 46, r: 12, t: 30, b: 42 },
          },
        ),
      };
    },
    numbers: () => ({
      head: ["client", "MB sent", "MB received"],
      rows: mine() ? sorted().map(([c, up, down]) => [scenario().clients[c], up, down]) : [],
    }),
  });
}
