// The page: sections in order, choices that hold for all of them, light and dark, and fresh data while a run goes on.
const section = (id, title, lead, ...content) =>
  el(
    "section",
    { id, "aria-labelledby": `${id}-title` },
    el("h2", { id: `${id}-title` }, title),
    lead ? el("p", { class: "lead" }, lead) : "",
    ...content,
  );

function runsTable() {
  const fields = [
    ["rounds", "rounds"],
    ["score", metric().name],
    ["epsilon", "epsilon"],
    ["megabytes_up", "MB sent"],
    ["megabytes_down", "MB received"],
    ["virtual_seconds", "virtual seconds"],
    ["seconds", "seconds"],
    ["engine", "engine"],
    ["device", "device"],
  ].filter(([key]) => scenario().runs.some(r => key in r.facts));
  const head = ["run", "method", "seed", ...fields.map(([, name]) => name)];
  const rows = scenario().runs.map(r => [r.folder, r.method, r.seed, ...fields.map(([key]) => r.facts[key] ?? null)]);
  const set = scenario()
    .runs.filter(r => r.settings.length)
    .flatMap(r => [el("h3", null, r.folder), el("pre", null, r.settings.join("\n"))]);
  return el(
    "figure",
    null,
    numbersTable(head, rows, "Runs"),
    set.length ? el("details", null, el("summary", null, "Settings of each run"), ...set) : "",
  );
}

// What a race of methods comes to: what to use first, then why, then commands.
const advice = ({ sentences: [use, ...why], next }) =>
  section(
    "advice",
    "Advice",
    use,
    el("ul", { class: "decisions" }, ...why.map(words => el("li", null, words))),
    el("h3", null, "What to try next"),
    el("pre", null, next.join("\n")),
  );

// clients that fell, or are worse off than alone, by more than chance
function toLookAt(alarms) {
  if (!alarms.length) return [];
  const more = alarms.length > 12 ? [`and ${alarms.length - 12} more`] : [];
  const list = [...alarms.slice(0, 12), ...more].map(words => el("li", null, words));
  return [el("p", { class: "note" }, "Clients to look at:"), el("ul", { id: "alarms", class: "decisions" }, ...list)];
}

function build() {
  figures.forEach(f => {
    seen.unobserve(f.node);
    Plotly.purge(f.plot);
  });
  figures.clear();
  const s = scenario(),
    main = document.getElementById("main"),
    [rounds, ...classes] = oneClient();
  const parts = [
    ...state.data.advice.filter(told => told.sentences.length).map(told => ["advice", "Advice", advice(told)]),
    [
      "summary",
      "Summary",
      el("section", { id: "summary", "aria-label": "Summary" }, facts(), el("h2", null, "Comparison"), comparison()),
    ],
    ["learning", "Learning", section("learning", "Learning", null, el("div", { class: "pair" }, ...learning()))],
    [
      "clients",
      "Clients",
      section(
        "clients",
        "Clients",
        "A mean can hide who pays for it.",
        ...toLookAt(s.alarms),
        s.everyone > s.clients.length
          ? el(
              "p",
              { class: "note" },
              `One by one, here and below, are ${s.clients.length} of ${s.everyone} clients, taken evenly through their ` +
                "scores; curves and tables are of all of them.",
            )
          : null,
        el("div", { class: "pair" }, spread(), gains()),
      ),
    ],
    s.quilts.length
      ? [
          "plan",
          "Quilt",
          section(
            "plan",
            "Who shares what with whom",
            "The sharing plan, round by round.",
            slider(),
            el("div", { id: "quilts" }, patchwork(), circles()),
            el("p", { class: "note", id: "thinned" }),
            el("div", { id: "decisions" }),
          ),
        ]
      : null,
    s.clients.length
      ? [
          "one-client",
          "One client",
          section(
            "one-client",
            "One client",
            null,
            clientPicks(),
            el("div", { class: "stack" }, rounds, el("div", { class: "pair" }, ...classes)),
          ),
        ]
      : null,
    ["traffic", "Data moved", section("traffic", "Data moved", null, movers())],
    state.data.tried?.length ? ["tried", "Settings", section("tried", "Settings", null, settingsTried())] : null,
    ["runs", "Runs", section("runs", "Runs", null, runsTable())],
  ].filter(Boolean);
  main.replaceChildren(...parts.map(([, , node]) => node));
  document.getElementById("links").replaceChildren(...parts.map(([id, name]) => el("a", { href: `#${id}` }, name)));
  if (s.quilts.length) {
    const keep = state.round;
    atLast();
    if (keep) moveTo(keep);
  }
}

function chips() {
  const swatch = i => {
    const NS = "http://www.w3.org/2000/svg",
      svg = document.createElementNS(NS, "svg"),
      path = document.createElementNS(NS, "path");
    svg.setAttribute("viewBox", "0 0 24 10");
    svg.setAttribute("aria-hidden", "true");
    path.setAttribute("d", "M0 5h24");
    path.setAttribute("stroke", lineColour(i));
    path.setAttribute("stroke-width", "2.6");
    path.setAttribute("stroke-dasharray", SVG_DASHES[DASHES.indexOf(dash(i))]);
    svg.append(path);
    return svg;
  };
  document.getElementById("chips").replaceChildren(
    ...scenario().methods.map((m, i) => {
      const button = el(
        "button",
        {
          type: "button",
          "aria-pressed": String(!state.hidden.has(i)),
          title: m.name,
          onclick: () => {
            state.hidden.has(i) ? state.hidden.delete(i) : state.hidden.add(i);
            button.setAttribute("aria-pressed", String(!state.hidden.has(i)));
            refresh("accuracy-over-rounds", "loss-over-rounds", "accuracy-against-megabytes", "accuracy-over-time", "spread-over-clients", "client-over-rounds");
          },
        },
        swatch(i),
        el("span", null, m.name),
      );
      return button;
    }),
  );
}
function picks() {
  const d = state.data,
    nodes = [];
  if (d.scenarios.length > 1)
    nodes.push(
      choice(
        "Scenario",
        d.scenarios.map(s => s.name),
        state.scenario,
        i => {
          Object.assign(state, { scenario: i, view: 0, quilt: 0, round: 0, client: 0 });
          state.hidden.clear();
          firstChoices();
          everything();
        },
      ),
    );
  if (scenario().views.length > 1)
    nodes.push(
      choice(
        "Read-out",
        scenario().views.map(v => v.title),
        state.view,
        i => {
          state.view = i;
          build();
        },
      ),
    );
  document.getElementById("picks").replaceChildren(...nodes);
}
// Open with the most interesting method: the best one, and the run whose plan has the most circles.
function firstChoices() {
  const names = methodNames(),
    best = Math.max(0, names.indexOf(view().table?.best.name));
  const gaining = view()
    .methods.map((m, i) => i)
    .filter(i => view().methods[i]?.gain && !["local", "alone"].includes(names[i]));
  state.gain = gaining.includes(best) ? best : (gaining[0] ?? best);
  state.detail = best;
  state.moved = scenario().traffic[state.gain] ? state.gain : Math.max(0, scenario().traffic.findIndex(Boolean));
  const rich = q => q.circles.length + (q.method === best ? 0.5 : 0);
  state.quilt = scenario().quilts.reduce((top, q, i, all) => (rich(q) > rich(all[top]) ? i : top), 0);
}
function everything() {
  chips();
  picks();
  build();
}

function themed() {
  document.documentElement.toggleAttribute("data-dark", isDark());
  if (state.data) {
    chips();
    refresh();
  }
}
document.getElementById("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  say(isDark() ? "Dark" : "Light");
  themed();
});
prefersDark.addEventListener("change", themed);
let narrow = phone();
addEventListener("resize", () => {
  if (phone() !== narrow) {
    narrow = phone();
    refresh();
  }
});

function load(data) {
  const first = !state.data;
  state.data = data;
  document.getElementById("title").textContent = data.title;
  if (first) firstChoices();
  everything();
}
themed();
let last = document.getElementById("data").textContent;
load(JSON.parse(last));

// While a run goes on, the page served on localhost asks for fresh data; a file on disk never asks anyone.
const every = Number("@@every@@");
if (every > 0) {
  setInterval(async () => {
    try {
      const text = await (await fetch("data.json", { cache: "no-store" })).text();
      if (text !== last) {
        last = text;
        const y = scrollY;
        load(JSON.parse(text));
        scrollTo({ top: y, behavior: "instant" });
        say("Updated");
      }
    } catch {
      say("The run's server has stopped; these are the last numbers it gave.");
    }
  }, 1000 * every);
}
