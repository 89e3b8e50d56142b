// The quilt: rows clients, columns units, colour circle. Then how circles split from unit to unit, or the routes through a pool.
const quilt = () => scenario().quilts[state.quilt];
const frameAt = round => {
  let k = 0;
  quilt().frames.forEach((f, i) => {
    if (f.round <= round) k = i;
  });
  return k;
};

// Cells of a frame: one array a unit, found by walking back to the frame that last changed it.
function sheet(frame) {
  return quilt().units.map((_, u) => {
    for (let k = frame; k >= 0; k--) if (quilt().frames[k].units[u]) return unpack(quilt().frames[k].units[u]);
    return new Uint8Array(quilt().clients.length);
  });
}
function sizes(column) {
  const found = new Map();
  for (const cell of column) found.set(cell, (found.get(cell) || 0) + 1);
  return found;
}
function rowOrder() {
  const names = scenario().clients,
    q = quilt();
  if (state.order === "similarity") return q.order;
  return q.order
    .slice()
    .sort((a, b) => names[q.clients[a]].localeCompare(names[q.clients[b]], "en", { numeric: true }));
}
// Labels of units lie flat where they fit.
const unitAngle = () =>
  quilt().units.reduce((n, u) => n + Math.min(20, u.length) + 1, 0) >
  (phone() ? 34 : quilt().units.length <= SIDE_BY_SIDE ? 55 : 120)
    ? -40
    : 0;
const unitTicks = n => Array.from({ length: n }, (_, u) => u).filter(u => u % Math.ceil(n / (phone() ? 14 : 36)) === 0);
const quiltHeight = () => {
  const n = quilt().clients.length;
  return n <= 60 ? Math.min(820, Math.max(220, 110 + 17 * n)) : Math.min(640, Math.max(480, n));
};
const SIDE_BY_SIDE = 10; // up to so many units, quilt and tree stand side by side under the slider

const circleName = cell => (cell ? `circle ${quilt().circles[cell - 1][1]}` : "private");
function planWords(cells) {
  return quilt().units.map((unit, u) => {
    const found = sizes(cells[u]),
      lone = found.get(0) || 0;
    found.delete(0);
    const circles = [...found.values()].sort((a, b) => b - a);
    if (!circles.length) return [unit, "private", lone];
    const told = circles.length > 8 ? circles.slice(0, 8).join(", ") + ", …" : circles.join(", ");
    return [unit, `${count(circles.length, "circle")} of ${told}`, lone];
  });
}

function slider() {
  const range = el("input", {
    type: "range",
    id: "round",
    min: 0,
    step: 1,
    "aria-label": "Round",
    oninput: () => moveTo(Number(range.value)),
  });
  const output = el("output", { for: "round", id: "round-now" });
  const step = by => {
    const k = frameAt(state.round),
      next = quilt().frames[Math.min(quilt().frames.length - 1, Math.max(0, k + by))];
    moveTo(by < 0 && state.round > quilt().frames[k].round ? quilt().frames[k].round : next.round);
  };
  let timer = null;
  const stop = () => {
    clearInterval(timer);
    timer = null;
    play.textContent = "▶ Play";
  };
  const play = el(
    "button",
    {
      type: "button",
      id: "play",
      onclick: () => {
        if (timer) return stop();
        if (state.round >= quilt().last) moveTo(quilt().frames[0].round);
        play.textContent = "❚❚ Pause";
        timer = setInterval(
          () =>
            state.round >= quilt().last ? stop() : moveTo(state.round + Math.max(1, Math.round(quilt().last / 100))),
          120,
        );
      },
    },
    "▶ Play",
  );
  const names = scenario().quilts.map(q => {
    const method = scenario().methods[q.method];
    return method.seeds.length > 1 ? `${method.name}, seed ${q.seed}` : method.name;
  });
  return el(
    "div",
    null,
    el(
      "div",
      { class: "controls" },
      choice("Run", names, state.quilt, i => {
        state.quilt = i;
        atLast();
      }),
      choice("Order of clients", ["by similarity", "by name"], state.order === "name" ? 1 : 0, i => {
        state.order = ["similarity", "name"][i];
        refresh("quilt", "circles");
      }),
    ),
    el(
      "div",
      { class: "controls" },
      el("div", { class: "slide" }, el("label", { for: "round" }, "Round"), range, output),
      el(
        "button",
        { type: "button", onclick: () => step(-1), "aria-label": "Previous change of the plan" },
        "‹ change",
      ),
      el("button", { type: "button", onclick: () => step(1), "aria-label": "Next change of the plan" }, "change ›"),
      play,
    ),
  );
}
function atLast() {
  const range = document.getElementById("round");
  range.min = quilt().frames[0].round;
  range.max = quilt().last;
  document.getElementById("quilts").className = quilt().units.length <= SIDE_BY_SIDE ? "pair" : "stack";
  document.getElementById("thinned").textContent = quilt().thinned
    ? "The plan changed so often that some rounds in between are left out."
    : "";
  document.getElementById("decisions").replaceChildren(...decided());
  moveTo(quilt().last);
}
// How a method came to its plan, in its own words: what it changed stands out from what it tried and left.
function decided() {
  const { changes, decisions: said, unsplit } = quilt();
  if (!said.length && !unsplit) return [];
  const list = sentences => el("ol", { class: "decisions" }, ...sentences.map(words => el("li", null, words)));
  return [
    el("h3", null, "Why it is shared so"),
    changes.length ? list(changes) : el("p", { class: "note" }, unsplit || "Nothing was changed."),
    ...(said.length ? [el("details", null, el("summary", null, `All that was asked (${said.length})`), list(said))] : []),
  ];
}
let pending = 0;
function moveTo(round) {
  const range = document.getElementById("round");
  state.round = Math.min(quilt().last, Math.max(quilt().frames[0].round, round));
  range.value = state.round;
  const changed = quilt().frames[frameAt(state.round)].round;
  document.getElementById("round-now").textContent = `${state.round} of ${quilt().last}`;
  range.setAttribute("aria-valuetext", `round ${state.round} of ${quilt().last}, plan of round ${changed}`);
  cancelAnimationFrame(pending);
  pending = requestAnimationFrame(() => refresh("quilt", "circles"));
}

const patchwork = () =>
  figure({
    id: "quilt",
    title: "The quilt",
    text: "Rows: clients. Columns: units, from input to output. Clients of one colour in a column share that unit in one circle; the same colour in two columns is a circle of the same clients. Blank is private: it never leaves the client.",
    draw() {
      const q = quilt(),
        cells = sheet(frameAt(state.round)),
        order = rowOrder(),
        found = cells.map(sizes),
        few = order.length <= 40 && q.units.length <= 24;
      const rows = pick => order.map(c => q.units.map((_, u) => pick(cells[u][c], u, c)));
      const names = order.map(c => escaped(scenario().clients[q.clients[c]], phone() ? 12 : 24));
      const labelled = order.length <= (phone() ? 40 : 60);
      const lone = q.units.map((_, u) => u).filter(u => !found[u].size || (found[u].size === 1 && found[u].has(0)));
      const scale = CIRCLES.flatMap((c, i) => [
        [i / CIRCLES.length, c],
        [(i + 1) / CIRCLES.length, c],
      ]);
      const thin = order.length > 150 ? 0 : 1;
      return {
        data: [
          {
            type: "heatmap",
            z: rows(cell => (cell ? (q.circles[cell - 1][2] % CIRCLES.length) + 0.5 : null)),
            zmin: 0,
            zmax: CIRCLES.length,
            colorscale: scale,
            showscale: false,
            xgap: q.units.length > 30 ? 1 : phone() ? 2 : 3,
            ygap: thin,
            hoverongaps: true,
            x: q.units.map((_, u) => u),
            y: order.map((_, k) => k),
            text: few ? rows(cell => (cell ? String(q.circles[cell - 1][1]) : "")) : undefined,
            texttemplate: few ? "%{text}" : undefined,
            textfont: { size: 10 },
            customdata: rows(
              (cell, u, c) =>
                `${escaped(scenario().clients[q.clients[c]])}<br>${escaped(q.units[u])}: ${cell ? `${circleName(cell)}, ${count(found[u].get(cell), "client")}` : "private"}`,
            ),
            hovertemplate: "%{customdata}<extra></extra>",
          },
        ],
        label:
          `Sharing plan in round ${state.round}: ` +
          planWords(cells)
            .map(([unit, what]) => `${unit} ${what}`)
            .join("; "),
        layout: layout(
          quiltHeight(),
          axis("", {
            side: "top",
            tickvals: unitTicks(q.units.length),
            ticktext: unitTicks(q.units.length).map(u => escaped(q.units[u], 20)),
            tickangle: unitAngle(),
            ticklabeloverflow: "allow",
            showgrid: false,
            showline: false,
            ticks: "",
          }),
          axis(labelled ? "" : count(order.length, "client"), {
            autorange: "reversed",
            tickvals: labelled ? order.map((_, k) => k) : [],
            ticktext: labelled ? names : [],
            showgrid: false,
            showline: false,
            ticks: "",
            tickfont: { size: 11, color: css("--soft") },
          }),
          {
            margin: { l: 20, r: unitAngle() ? 34 : 8, t: 40, b: 10 },
            annotations: lone.map(u => ({
              x: u,
              y: (order.length - 1) / 2,
              text: "private",
              textangle: -90,
              showarrow: false,
              font: { size: 12, color: css("--soft") },
            })),
          },
        ),
      };
    },
    numbers() {
      const q = quilt(),
        cells = sheet(frameAt(state.round));
      return {
        head: ["round", "client", ...q.units],
        rows: rowOrder().map(c => [
          state.round,
          scenario().clients[q.clients[c]],
          ...cells.map(column => (column[c] ? q.circles[column[c] - 1][1] : "private")),
        ]),
      };
    },
  });

const circles = () =>
  figure({
    id: "circles",
    title: "From unit to unit",
    text: () =>
      quilt().layers
        ? "The routes clients take through the pool of modules. The number in a block: clients that use it; the width of a line: clients that use both its ends."
        : "Who stays together from the input to the output. A circle that splits on its way up is a tree with its branches; dotted: private.",
    draw() {
      return quilt().layers ? routes() : tree();
    },
    numbers() {
      return { head: ["unit", "circles", "private clients"], rows: planWords(sheet(frameAt(state.round))) };
    },
  });
