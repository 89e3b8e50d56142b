// Circles from unit to unit: as a tree whose branches are circles (FedDL), or as routes through a pool of blocks (FedMN).
// Units in a row that the same clients share in the same way are one column of the tree.
function joined(cells) {
  const columns = [],
    from = [],
    to = [];
  cells.forEach((column, u) => {
    const before = columns[columns.length - 1],
      match = new Map(),
      back = new Map();
    const same =
      before &&
      column.every((cell, c) => {
        if (!match.has(before[c])) match.set(before[c], cell);
        if (!back.has(cell)) back.set(cell, before[c]);
        return match.get(before[c]) === cell && back.get(cell) === before[c] && (cell === 0) === (before[c] === 0);
      });
    if (same) to[to.length - 1] = u;
    else {
      columns.push(column);
      from.push(u);
      to.push(u);
    }
  });
  const units = quilt().units;
  return [columns, from.map((u, k) => (to[k] === u ? units[u] : `${units[u]} – ${units[to[k]]}`))];
}
function tree() {
  const q = quilt(),
    whole = sheet(frameAt(state.round)),
    place = new Map(rowOrder().map((c, k) => [c, k])),
    total = q.clients.length;
  const [cells, names] = joined(whole);
  const last = cells.length - 1,
    half = 0.09,
    counted = cells.length <= (phone() ? 8 : 16),
    shapes = [],
    dots = { x: [], y: [], text: [], words: [] };
  // Each column stacks its circles in the order of the quilt's rows, private clients at the bottom.
  const columns = cells.map(column => {
    const groups = new Map();
    for (let c = 0; c < total; c++) {
      if (!groups.has(column[c])) groups.set(column[c], []);
      groups.get(column[c]).push(c);
    }
    const middle = members => members.reduce((a, c) => a + place.get(c), 0) / members.length;
    const sorted = [...groups].sort((a, b) => (a[0] === 0) - (b[0] === 0) || middle(a[1]) - middle(b[1]));
    const gap = Math.min(0.012 * total, (0.25 * total) / sorted.length);
    let at = (-gap * (sorted.length - 1)) / 2;
    const top = new Map();
    for (const [cell, members] of sorted) {
      top.set(cell, at);
      at += members.length + gap;
    }
    return { groups: sorted, top };
  });
  const colour = cell => (cell ? circleColour(q.circles[cell - 1][2]) : "#8a949d");
  for (let u = 0; u < last; u++) {
    const left = new Map(columns[u].top),
      right = new Map(columns[u + 1].top);
    for (const [a] of columns[u].groups)
      for (const [b, members] of columns[u + 1].groups) {
        const n = members.filter(c => cells[u][c] === a).length;
        if (!n) continue;
        const y1 = left.get(a),
          y2 = right.get(b),
          x1 = u + half,
          x2 = u + 1 - half,
          m = (x1 + x2) / 2;
        left.set(a, y1 + n);
        right.set(b, y2 + n);
        shapes.push({
          type: "path",
          layer: "below",
          line: { width: 0 },
          fillcolor: faint(colour(b), b ? 0.3 : 0.13),
          path: `M${x1},${y1} C${m},${y1} ${m},${y2} ${x2},${y2} L${x2},${y2 + n} C${m},${y2 + n} ${m},${y1 + n} ${x1},${y1 + n} Z`,
        });
      }
  }
  columns.forEach(({ groups, top }, u) =>
    groups.forEach(([cell, members]) => {
      const y = top.get(cell);
      shapes.push({
        type: "rect",
        layer: "below",
        x0: u - half,
        x1: u + half,
        y0: y,
        y1: y + members.length,
        line: { width: cell ? 0 : 1, color: colour(cell), dash: "dot" },
        fillcolor: cell ? colour(cell) : faint(colour(0), 0.15),
      });
      dots.x.push(u);
      dots.y.push(y + members.length / 2);
      dots.text.push(counted && (members.length >= total * 0.045 || groups.length === 1) ? String(members.length) : "");
      const named =
        members
          .slice(0, 12)
          .map(c => escaped(scenario().clients[q.clients[c]], 20))
          .join(", ") + (members.length > 12 ? ", …" : "");
      dots.words.push(
        `${escaped(names[u])}: ${cell ? circleName(cell) : "private"}, ${count(members.length, "client")}<br>${named}`,
      );
    }),
  );
  const height = phone() ? 340 : Math.max(380, Math.min(quiltHeight(), 640));
  return {
    data: [
      {
        x: dots.x,
        y: dots.y,
        mode: "markers",
        customdata: dots.words,
        marker: { size: 18, opacity: 0 },
        hovertemplate: "%{customdata}<extra></extra>",
      },
      {
        x: dots.x.map(x => x + half),
        y: dots.y,
        mode: "text",
        text: dots.text.map(t => t && " " + t),
        textposition: "middle right",
        textfont: { color: css("--ink"), size: 12 },
        hoverinfo: "skip",
        cliponaxis: false,
      },
    ],
    label:
      "Circles from unit to unit: " +
      planWords(whole)
        .map(([unit, what]) => `${unit} ${what}`)
        .join("; "),
    layout: layout(
      height,
      axis("", {
        side: "top",
        range: [-0.3, last + 0.45],
        tickvals: unitTicks(names.length),
        ticktext: unitTicks(names.length).map(u => escaped(names[u], 24)),
        ticklabeloverflow: "allow",
        showgrid: false,
        showline: false,
        ticks: "",
        tickangle: names.join("  ").length > (phone() ? 34 : q.units.length <= SIDE_BY_SIDE ? 60 : 130) ? -40 : 0,
      }),
      axis("", { autorange: "reversed", showticklabels: false, showgrid: false, showline: false, ticks: "" }),
      { shapes, margin: { l: 8, r: 8, t: 40, b: 8 } },
    ),
  };
}

function routes() {
  const q = quilt(),
    cells = sheet(frameAt(state.round)),
    total = q.clients.length,
    data = [],
    active = (u, c) => cells[u][c] > 0;
  const users = q.units.map((_, u) => {
    let n = 0;
    for (let c = 0; c < total; c++) n += active(u, c);
    return n;
  });
  const chosen = q.clients.indexOf(state.client),
    spot = new Map();
  q.layers.forEach((layer, x) => layer.forEach((u, k) => spot.set(u, [x, (k + 0.5) / layer.length])));
  const line = (u, v, width, colour, words) =>
    data.push({
      x: [spot.get(u)[0], spot.get(v)[0]],
      y: [spot.get(u)[1], spot.get(v)[1]],
      mode: "lines",
      line: { width, color: colour },
      hoverinfo: "skip",
      showlegend: false,
      text: words,
    });
  for (let x = 0; x + 1 < q.layers.length; x++)
    for (const u of q.layers[x])
      for (const v of q.layers[x + 1]) {
        let n = 0;
        for (let c = 0; c < total; c++) n += active(u, c) && active(v, c);
        if (n) line(u, v, 1 + (9 * n) / total, faint(lineColour(0), 0.28));
      }
  if (chosen >= 0)
    for (let x = 0; x + 1 < q.layers.length; x++)
      for (const u of q.layers[x])
        for (const v of q.layers[x + 1]) {
          if (active(u, chosen) && active(v, chosen)) line(u, v, 2.5, lineColour(1));
        }
  const all = q.layers.flat(),
    mine = u => chosen >= 0 && active(u, chosen);
  data.push({
    x: all.map(u => spot.get(u)[0]),
    y: all.map(u => spot.get(u)[1]),
    mode: "markers+text",
    showlegend: false,
    marker: {
      size: all.map(u => 16 + 30 * Math.sqrt(users[u] / total)),
      color: all.map(u => (users[u] ? (isDark() ? "#1e5a80" : "#cfe3f1") : css("--card"))),
      line: {
        width: all.map(u => (mine(u) ? 3.5 : 1.2)),
        color: all.map(u => (mine(u) ? lineColour(1) : lineColour(0))),
      },
      opacity: 1,
    },
    text: all.map(u => String(users[u])),
    textfont: { color: css("--ink"), size: 12 },
    customdata: all.map(u => `${escaped(q.units[u])}: used by ${users[u]} of ${count(total, "client")}`),
    hovertemplate: "%{customdata}<extra></extra>",
    cliponaxis: false,
  });
  const layerNames = q.layers.map(layer => escaped(q.units[layer[0]].replace(/\.\d+$/, ""), 16));
  const who =
    chosen >= 0
      ? `Ringed: the route of ${escaped(scenario().clients[state.client], 24)}, chosen under “One client”.`
      : "";
  return {
    data,
    label: "Blocks in use: " + all.map(u => `${q.units[u]} by ${users[u]} clients`).join(", "),
    layout: layout(
      phone() ? 360 : Math.max(380, Math.min(quiltHeight(), 640)),
      axis("", {
        side: "top",
        range: [-0.35, q.layers.length - 0.65],
        tickvals: q.layers.map((_, x) => x),
        ticktext: layerNames,
        showgrid: false,
        showline: false,
        ticks: "",
      }),
      axis("", { range: [1.05, -0.05], showticklabels: false, showgrid: false, showline: false, ticks: "" }),
      {
        margin: { l: 8, r: 8, t: 40, b: 30 },
        annotations: [
          {
            xref: "paper",
            yref: "paper",
            x: 0,
            y: -0.02,
            yanchor: "top",
            xanchor: "left",
            showarrow: false,
            align: "left",
            font: { size: 12, color: css("--soft") },
            text: who,
          },
        ],
      },
    ),
  };
}
