// State, small helpers, colours. All text from runs enters the page through textContent or escaped(), never as markup.
const state = {
  data: null,
  scenario: 0,
  view: 0,
  hidden: new Set(),
  quilt: 0,
  round: 0,
  order: "similarity",
  client: 0,
  detail: 0,
  gain: 0,
  moved: 0,
};
const scenario = () => state.data.scenarios[state.scenario];
const view = () => scenario().views[state.view];
const shown = () =>
  scenario()
    .methods.map((m, i) => i)
    .filter(i => !state.hidden.has(i) && view().methods[i]);
const phone = () => window.innerWidth < 760;

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value != null) node.setAttribute(key, value);
  }
  node.append(...children.filter(c => c != null));
  return node;
}

// Plotly reads a little markup in labels: names go in escaped, and shortened so that axes keep their room.
function escaped(text, most = 0) {
  let plain = String(text);
  if (most && plain.length > most) plain = plain.slice(0, most - 1) + "…";
  return plain.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/\n/g, " ");
}

const TYPES = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, f4: Float32Array };
const unpackedArrays = new WeakMap();
function unpack(array) {
  if (!array) return null;
  if (!unpackedArrays.has(array)) {
    const bytes = Uint8Array.from(atob(array.data), c => c.charCodeAt(0));
    unpackedArrays.set(array, new TYPES[array.type](bytes.buffer));
  }
  return unpackedArrays.get(array);
}

// Scores as their metric is shown: shares in per cent, others as they are.
const metric = () => scenario().metric;
const metricName = () => metric().name[0].toUpperCase() + metric().name.slice(1);
const metricAxis = () => (metric().percent ? `${metric().name}, %` : metric().name);
const factor = () => (metric().percent ? 100 : 1);
const metricUnit = () => (metric().percent ? " %" : "");
const format = (sign = "") => (metric().percent ? `${sign}.1f` : `${sign}.4~g`);
function score(value) {
  if (value == null || Number.isNaN(value)) return "–";
  return metric().percent ? (100 * value).toFixed(1) : String(Number(value.toPrecision(4)));
}
const scaled = values => Array.from(values, v => (v == null || Number.isNaN(v) ? null : factor() * v));
function amount(value) {
  if (value == null) return "–";
  return value >= 100 ? Math.round(value).toLocaleString("en-GB") : String(Number(value.toPrecision(3)));
}
const count = (n, noun) => `${n.toLocaleString("en-GB")} ${noun}${n === 1 ? "" : "s"}`;
const median = values => {
  const s = values.slice().sort((a, b) => a - b);
  return s[Math.floor((s.length - 1) / 2)];
};

// Okabe and Ito's colours, told apart by people with any kind of colour vision; yellow is darkened to be seen on white.
// A method also has its own dash and marker, a circle its own number, so that nothing depends on colour alone.
const LINES = {
  light: ["#0072b2", "#d55e00", "#009e73", "#b1568c", "#8a6a00", "#2f9bd6", "#4d5761"],
  dark: ["#5db3e8", "#ff8a4c", "#3ecfa0", "#e69bc4", "#f0c94a", "#9ad8ff", "#c3ccd4"],
};
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const SVG_DASHES = ["", "6 4", "2 3", "6 3 2 3", "9 4", "9 3 2 3"];
const MARKERS = ["circle", "diamond", "square", "triangle-up", "cross", "x", "star"];
const BASE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442"];
function blend(colour, other, share) {
  const part = i =>
    Math.round(parseInt(colour.slice(i, i + 2), 16) * (1 - share) + parseInt(other.slice(i, i + 2), 16) * share);
  return "#" + [1, 3, 5].map(i => part(i).toString(16).padStart(2, "0")).join("");
}
const CIRCLES = [...BASE, ...BASE.map(c => blend(c, "#ffffff", 0.5)), ...BASE.map(c => blend(c, "#000000", 0.4))];
const circleColour = i => CIRCLES[i % CIRCLES.length];

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme || (prefersDark.matches ? "dark" : "light")) === "dark";
const lineColour = i => {
  const colours = LINES[isDark() ? "dark" : "light"];
  return colours[i % colours.length];
};
const dash = i => DASHES[(i + Math.floor(i / 7)) % DASHES.length];
function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
function faint(colour, alpha) {
  return `rgba(${[1, 3, 5].map(i => parseInt(colour.slice(i, i + 2), 16)).join(",")},${alpha})`;
}

function axis(title, more) {
  return {
    title: { text: title, font: { size: 12.5, color: css("--soft") }, standoff: 8 },
    gridcolor: css("--grid"),
    zeroline: false,
    linecolor: css("--line"),
    tickcolor: css("--line"),
    tickfont: { color: css("--soft"), size: 12 },
    automargin: true,
    fixedrange: true,
    ...more,
  };
}
function layout(height, x, y, more) {
  return {
    height,
    xaxis: x,
    yaxis: y,
    showlegend: false,
    dragmode: false,
    hovermode: "closest",
    margin: { l: 46, r: 12, t: 10, b: 42 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: css("--sans"), size: 12.5, color: css("--ink") },
    hoverlabel: {
      bgcolor: css("--card"),
      bordercolor: css("--line"),
      font: { family: css("--sans"), color: css("--ink"), size: 12.5 },
      align: "left",
    },
    legend: { orientation: "h", y: 1.12 },
    ...more,
  };
}

function say(text) {
  document.getElementById("live").textContent = text;
}
function choice(label, options, selected, changed) {
  const select = el(
    "select",
    { onchange: () => changed(Number(select.value)) },
    ...options.map((name, i) => el("option", { value: i, selected: i === selected }, name)),
  );
  return el("label", null, label, select);
}
