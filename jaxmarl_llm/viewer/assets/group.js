// The group of a prompt: its completions side by side, as bars around the mean and as numbers.
function whyChip(s) {
  return el(
    "span",
    { class: `chip ${s.trained ? "yes" : s.valid ? "no" : "lost"}`, title: WHY[s.why] || "" },
    plain(s.why).replace(/_/g, " "),
  );
}
function miniBar(step, s, most) {
  const p = palette(),
    W = 84,
    d = step.deviation(s),
    svg = sv("svg", { width: W, height: 14, "aria-hidden": "true" });
  svg.append(sv("line", { x1: W / 2, x2: W / 2, y1: 0, y2: 14, stroke: p.soft }));
  if (d !== null) {
    const w = Math.max(2, (Math.abs(d) / most) * (W / 2 - 2)),
      colour = diverging(s.advantage, step.most, p);
    svg.append(
      sv("rect", {
        x: d < 0 ? W / 2 - w : W / 2,
        y: 2,
        width: w,
        height: 10,
        fill: s.trained ? colour : p.panel,
        stroke: colour,
        "stroke-width": 1.5,
        "stroke-dasharray": isOpponent(s) ? "3 2" : null,
      }),
    );
  }
  return svg;
}
function groupPanel(where, step, node) {
  const samples = step.samples(node.node),
    group = step.groupOf(node.node);
  const most = Math.max(1e-12, ...chunked(samples.map((s) => Math.abs(step.deviation(s) || 0))));
  const open = (s) => go({ ...where, node: node.node, sample: s.step });
  const facts = group
    ? `group ${group.group}: ${many(group.size, "return")}, mean ${num(group.mean)}, variance ` +
      `${num(group.variance)}, from ${num(group.low)} to ${num(group.high)}`
    : "no completion of it was compared";
  const wider =
    group && group.size > samples.length
      ? ` The group has ${group.size - samples.length} more completions, of other prompts.`
      : "";
  return el(
    "section",
    {},
    el(
      "h1",
      {},
      el("span", { style: `color:${roleColour(step.roles, node.role)}` }, node.role),
      el("span", { class: "soft" }, ` \u00b7 turn ${node.turn} \u00b7 node ${node.node}`),
    ),
    el(
      "div",
      { class: "soft small" },
      node.model === node.role ? null : `played by ${node.model} \u00b7 `,
      facts,
      group ? el("span", {}, " \u00b7 ", el("b", {}, group.selected ? "selected" : "not selected")) : null,
      wider,
    ),
    el(
      "div",
      { class: "scroll" },
      el(
        "table",
        { id: "group" },
        head(["", "completion", "return", "around the mean", "advantage", "", ""].map((t, i) =>
              el("th", { class: i === 2 || i === 4 ? "num" : null }, t),
            )),
        el(
          "tbody",
          {},
          samples.slice(0, 400).map((s) =>
            el(
              "tr",
              {
                class: `link${where.sample === s.step ? " here" : ""}`,
                tabindex: 0,
                "data-row": s.step,
                onclick: () => open(s),
                onkeydown: (e) => {
                  if (e.key === "Enter") open(s);
                },
              },
              el("td", { class: "soft small num" }, s.step),
              el("td", { class: "mono small" }, cut(s.text, 30) || "(empty)"),
              el("td", { class: "num" }, num(s.returns)),
              el("td", {}, miniBar(step, s, most)),
              el(
                "td",
                {
                  class: "num",
                  style: s.advantage ? `color:${s.advantage > 0 ? "var(--good)" : "var(--bad)"};font-weight:600` : null,
                },
                signed(s.advantage),
              ),
              el("td", {}, whyChip(s)),
              el("td", { class: "small soft" }, s.truncated ? "cut off" : ""),
            ),
          ),
        ),
      ),
    ),
  );
}
