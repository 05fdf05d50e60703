// The text of a completion, each token tinted by its log-prob, or by the difference of the update's log-prob to the
// sampler's.
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
      el("span", {}, "under the distribution that the tokens were sampled from"),
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
      s.token_ids.length && !s.token_chars.length
        ? el("span", { class: "soft", id: "nopieces" }, "The file has no text of tokens: ids are shown.")
        : null,
    ),
    tokenBox(s, values(s), colour, (v) => most > 0 && Math.abs(v) === most),
    el("div", { class: "legend" }, legend(), s.token_chars.length ? signs() : null),
  );
  return strip;
}
const signs = () => [
  el("span", {}, "\u00b7 space, \u21b5 end of a line, \u21e5 tab"),
  el("span", {}, "italic: the name of a token without text; \\xe2: bytes of a character that a later token completes"),
];
// What each token shows: its piece of the text, or its name; null where the file has no pieces. Lengths of pieces count
// characters, and not units of UTF-16.
function tokenTexts(s) {
  if (!s.token_chars.length) return null;
  const chars = Array.from(s.text);
  let at = 0,
    named = 0;
  return s.token_chars.map((size) => {
    const piece = chars.slice(at, (at += size)).join("");
    return /[^\ufffd]/.test(piece) ? { text: piece, name: false } : { text: s.token_names[named++], name: true };
  });
}
const WHITE = { " ": "\u00b7", "\t": "\u21e5", "\n": "\u21b5\n" };
const visible = (text) => plain(text).replace(/[ \t\n]/g, (c) => WHITE[c]);
// The first 400 tokens, and a button for more. marked(value): whether a token has a strong border.
function tokenBox(s, values, colour, marked) {
  const texts = tokenTexts(s),
    box = el("div", { class: `tokens mono${texts ? " pieces" : ""}`, id: "tokens" }),
    size = 400;
  const shown = (i) => (texts ? (texts[i].name ? plain(texts[i].text) : visible(texts[i].text)) : s.token_ids[i]);
  const title = (i) =>
    `token ${i}: ${texts ? (texts[i].name ? plain(texts[i].text) : JSON.stringify(plain(texts[i].text))) + ", " : ""}` +
    `id ${s.token_ids[i]}, log-prob ${num(s.logprobs[i], 4)}` +
    (s.gaps.length ? `, update \u2212 sampler ${signed(s.gaps[i])}` : "");
  const style = (i) =>
    [marked(values[i]) && "most", texts && texts[i].name && "name"].filter(Boolean).join(" ") || null;
  const more = (from) => {
    for (let i = from; i < Math.min(from + size, s.token_ids.length); i++)
      box.append(el("span", { class: style(i), style: `background:${colour(values[i])}`, title: title(i) }, shown(i)));
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
