// The tokens of a completion, tinted by log-prob, or by the difference of the update's log-prob to the sampler's.
// Dark text is readable on every tint, so that a tint is the same on a light and on a dark page.
const PALE = [246, 246, 240],
  SURPRISE = [204, 76, 142],
  LOWER = [236, 145, 56],
  HIGHER = [112, 170, 230],
  UNKNOWN = "#c9ccd0";
// Log-prob 0 is pale; -5 and below is strong.
const surprise = (v) => (v === null ? UNKNOWN : mixed(PALE, SURPRISE, clamp(-v / 5, 0, 1)));
// A difference of 1e-6 is pale, one of 0.1 is strong, and every factor of ten between them is a step. Orange and blue
// differ for every common kind of colour blindness.
const gapTint = (v) =>
  v === null
    ? UNKNOWN
    : mixed(PALE, v < 0 ? LOWER : HIGHER, v === 0 ? 0 : clamp((Math.log10(Math.abs(v)) + 6) / 5, 0, 1));
const ramp = (...colours) =>
  el("span", { class: "ramp", style: `background:linear-gradient(90deg,${colours.join(",")})` });
const TINTS = {
  logprob: {
    name: "log-prob",
    values: (s) => s.logprobs,
    colour: surprise,
    about: (known) => `sum of log-probs ${num(known.reduce((a, b) => a + b, 0))} \u00b7 mean ${num(mean(known))}`,
    legend: () => [
      "log-prob 0 ",
      ramp(surprise(0), surprise(-5)),
      " \u22125 and less",
      el("span", {}, "ids of tokens, under the distribution that they were sampled from"),
    ],
  },
  gap: {
    name: "update \u2212 sampler",
    values: (s) => s.gaps,
    colour: gapTint,
    about: (known) =>
      `log-prob of the update minus that of the sampler: largest ${num(Math.max(...chunked(known.map(Math.abs))))}` +
      ` \u00b7 mean ${signed(mean(known))}`,
    legend: () => [
      "\u22120.1 and less ",
      ramp(...[-1e-1, -1e-2, -1e-3, -1e-4, -1e-5, 0, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1].map(gapTint)),
      " +0.1 and more",
      el("span", {}, "orange: less probable for the update, blue: more; each step is a factor of 10"),
      el("span", {}, "border: the largest difference"),
      swatch(UNKNOWN, "unknown"),
    ],
  },
};
let tint = "logprob"; // as chosen last

function tokenStrip(where, s) {
  const there = s.gaps.length > 0;
  if (where.tint in TINTS) tint = where.tint;
  const shown = there ? tint : "logprob",
    { values, colour, about, legend } = TINTS[shown];
  const known = values(s).filter((v) => v !== null);
  const most = shown === "gap" && known.length ? Math.max(...chunked(known.map(Math.abs))) : 0;
  const choice = (name) =>
    el(
      "button",
      {
        type: "button",
        "data-tint": name,
        "aria-pressed": String(name === shown),
        disabled: name === "gap" && !there,
        onclick: () => {
          history.replaceState(null, "", link({ ...place(), tint: name }));
          const other = tokenStrip({ ...where, tint: name }, s);
          strip.replaceWith(other);
          other.querySelector(`[data-tint="${name}"]`).focus();
        },
      },
      TINTS[name].name,
    );
  const strip = el(
    "div",
    {},
    el(
      "h3",
      {},
      `Tokens: ${s.token_ids.length}`,
      el(
        "span",
        { class: "soft small", id: "tokensum" },
        `${s.truncated ? ", cut off by the length limit" : ""} \u00b7 ${known.length ? about(known) : "none is known"}`,
      ),
    ),
    el(
      "div",
      { class: "tools small", role: "group", "aria-label": "Tint of tokens" },
      "tint: ",
      choice("logprob"),
      choice("gap"),
      there
        ? null
        : el(
            "span",
            { class: "soft", id: "nogap" },
            s.trained
              ? "The file has no log-probs of the update."
              : "It was not trained: no update computed log-probs.",
          ),
    ),
    tokenBox(s, values(s), colour, (v) => most > 0 && Math.abs(v) === most),
    el("div", { class: "legend" }, legend()),
  );
  return strip;
}
// The first 400 tokens, and a button for more. marked(value): whether a token has a strong border.
function tokenBox(s, values, colour, marked) {
  const box = el("div", { class: "tokens mono", id: "tokens" }),
    size = 400;
  const title = (i) =>
    `token ${i}: id ${s.token_ids[i]}, log-prob ${num(s.logprobs[i], 4)}` +
    (s.gaps.length ? `, update \u2212 sampler ${signed(s.gaps[i])}` : "");
  const more = (from) => {
    s.token_ids.slice(from, from + size).forEach((id, k) => {
      const value = values[from + k];
      box.append(
        el(
          "span",
          { class: marked(value) ? "most" : null, style: `background:${colour(value)}`, title: title(from + k) },
          id,
        ),
      );
    });
    const left = s.token_ids.length - from - size;
    if (left > 0) {
      const next = () => {
        button.remove();
        more(from + size);
      };
      const button = el("button", { type: "button", onclick: next }, `${left} more`);
      box.append(button);
    }
  };
  more(0);
  return box;
}
