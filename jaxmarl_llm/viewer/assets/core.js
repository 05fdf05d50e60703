// Elements, numbers, the place in the hash, and steps that are loaded when they are needed.
const $ = (id) => document.getElementById(id);
const NS = "http://www.w3.org/2000/svg";

// Adds attributes, listeners (keys `on...`) and kids; a kid that is text stays text.
function fill(node, attrs, kids) {
  for (const [key, value] of Object.entries(attrs || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  for (const kid of kids.flat(3)) if (kid !== null && kid !== undefined && kid !== false) node.append(kid);
  return node;
}
const el = (tag, attrs, ...kids) => fill(document.createElement(tag), attrs, kids);
const sv = (tag, attrs, ...kids) => fill(document.createElementNS(NS, tag), attrs, kids);
const head = (cells) => el("thead", {}, el("tr", {}, cells));
// The last row of a long table: a button that makes room for the next rows.
function moreRow(span, label, next) {
  const show = () => {
    row.remove();
    next();
  };
  const row = el("tr", {}, el("td", { colspan: span }, el("button", { type: "button", onclick: show }, label)));
  return row;
}

// Characters that turn or hide text are shown by their code; line ends and tabs stay.
const plain = (text) =>
  String(text).replace(
    /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g,
    (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"),
  );
const DASH = "\u2013",
  MINUS = "\u2212";
function num(value, digits = 3) {
  if (value === null || value === undefined) return DASH;
  const size = Math.abs(value);
  const text =
    size !== 0 && (size >= 1e6 || size < 1e-4)
      ? value.toExponential(2)
      : String(+value.toPrecision(Math.max(digits, size >= 1 ? String(Math.trunc(size)).length : digits)));
  return text.replace(/-/g, MINUS);
}
const signed = (value, digits = 3) =>
  value === null || value === undefined ? DASH : (value > 0 ? "+" : "") + num(value, digits);
const mean = (values) => {
  const known = values.filter((v) => v !== null && v !== undefined);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
};
const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
const cut = (text, most, tail) => {
  text = plain(text).replace(/\s+/g, " ");
  return text.length <= most ? text : tail ? "\u2026" + text.slice(1 - most) : text.slice(0, most - 1) + "\u2026";
};
const many = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

// ------------------------------------------------------------------------------------------------------------ colours
// The first six are those of Okabe and Ito. Any two differ for every common kind of colour blindness.
const ROLES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6a3fc0", "#4d4d4d"];
const BRIGHT = ["#5c79c8", "#dc903c", "#3abd80", "#bb8aaf", "#ffe44b", "#a8ffff", "#9853ff", "#d9ffab"]; // on dark
const PALETTES = {
  light: {
    bg: "#fbfbf9",
    panel: "#ffffff",
    ink: "#1c1f23",
    soft: "#5c636b",
    line: "#d9dce0",
    band: "#f2f3f0",
    accent: "#0b62a8",
    none: "#9aa0a6",
    low: [179, 88, 6],
    mid: [178, 182, 187],
    high: [33, 102, 172],
  },
  dark: {
    bg: "#15181c",
    panel: "#1d2126",
    ink: "#e8eaec",
    soft: "#a3abb3",
    line: "#3a4048",
    band: "#191d21",
    accent: "#7cb8f0",
    none: "#7d838a",
    low: [240, 153, 74],
    mid: [92, 98, 105],
    high: [103, 169, 232],
  },
};
let dark = false;
const palette = () => (dark ? PALETTES.dark : PALETTES.light);
const mixed = (a, b, t) => `rgb(${a.map((v, i) => Math.round(v + (b[i] - v) * t)).join(",")})`;
// Orange below zero, blue above: these differ for every common kind of colour blindness.
function diverging(value, most, colours = palette()) {
  if (value === null || value === undefined) return colours.none;
  const t = most > 0 ? clamp(value / most, -1, 1) : 0;
  return mixed(colours.mid, t < 0 ? colours.low : colours.high, t === 0 ? 0 : 0.3 + 0.7 * Math.abs(t));
}
const roleColour = (roles, role) => (dark ? BRIGHT : ROLES)[Math.max(0, roles.indexOf(role)) % ROLES.length];

// ---------------------------------------------------------------------------------------------------------- the place
const NUMBERS = ["run", "step", "task", "node", "sample", "run2", "step2", "task2", "from", "to"];
// A step is the number of a training step, or `eval-50` for the held-out tasks of the evaluation after step 50.
const EVALUATION = /^eval-\d{1,15}$/;
const isEvaluation = (step) => typeof step === "string";
const stepName = (step) => (isEvaluation(step) ? `evaluation after step ${step.slice(5)}` : `step ${step}`);
const everyStep = (run) => (run ? run.steps.concat(run.held_out) : []);
const likeStep = (run, step) => (run ? (isEvaluation(step) ? run.held_out : run.steps) : []);
const newestStep = (run) => (run.steps.length ? run.steps : run.held_out).slice(-1)[0];
function place() {
  const found = {};
  for (const [key, value] of new URLSearchParams(location.hash.slice(1))) {
    if (!NUMBERS.includes(key) || (key.startsWith("step") && EVALUATION.test(value))) found[key] = value;
    else if (/^\d{1,15}$/.test(value)) found[key] = +value;
  }
  return found;
}
const link = (where) =>
  "#" + new URLSearchParams(Object.entries(where).filter(([, v]) => v !== undefined && v !== null));
function go(where, replace) {
  if (replace) {
    history.replaceState(null, "", link(where));
    route();
  } else location.hash = link(where);
}
const say = (text) => {
  $("status").textContent = text;
};

// ------------------------------------------------------------------------------------------------------------- steps
let index = { runs: [], live: false };
const CACHE = 12,
  cached = new Map();

async function unpack(text) {
  const raw = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}
async function fetched(address) {
  const answer = await fetch(address);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}
async function read(run, step) {
  if (index.live) return fetched(`step?run=${run}&step=${step}`);
  const held = document.querySelector(`script[data-step="${run}.${step}"]`);
  if (held) return unpack(held.textContent);
  const known = index.runs[run];
  throw new Error(
    known && known.left_out.includes(step)
      ? `The ${stepName(step)} is not in this page: it did not fit. A larger --max-mb keeps it.`
      : `There is no ${stepName(step)} of run ${run}.`,
  );
}
function load(run, step) {
  const key = `${run}.${step}`;
  if (!cached.has(key)) {
    const made = read(run, step).then((data) => new Step(data, run));
    made.catch(() => cached.delete(key));
    cached.set(key, made);
  } else {
    const made = cached.get(key);
    cached.delete(key);
    cached.set(key, made);
  }
  while (cached.size > CACHE) cached.delete(cached.keys().next().value);
  return cached.get(key);
}
const pause = () => new Promise((done) => setTimeout(done));
