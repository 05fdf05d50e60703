// The signs of a tree: cards with bars, edges, ties of joint actions, and squares of crossed ones.
const T = (x, y, text, size, fill, more) =>
  sv("text", { x, y, "font-size": size, fill, "font-family": "system-ui, sans-serif", ...more }, text);

function drawNode(step, place, item, p, here) {
  const { node, samples, group } = item,
    opponent = samples.some(isOpponent),
    base = barMiddle(item);
  const g = sv("g", { "data-node": node.node, cursor: "pointer" });
  g.append(
    sv("rect", {
      x: item.x,
      y: item.y,
      width: CARD.w,
      height: item.h,
      rx: 7,
      fill: p.panel,
      stroke: here.node === node.node ? p.accent : group && group.selected ? p.soft : p.line,
      "stroke-width": here.node === node.node ? 2.6 : item.main ? 2 : 1,
      "stroke-dasharray": opponent ? "5 4" : null,
    }),
  );
  const several = group && group.size > 1;
  g.append(
    T(item.x + 8, item.y + 15, `#${node.node}`, 11, p.ink, { "font-weight": 650 }),
    T(
      item.x + CARD.w - 8,
      item.y + 15,
      several ? (group.low === group.high ? "all equal" : `\u03c3\u00b2 ${num(group.variance, 2)}`) : "",
      10.5,
      p.soft,
      { "text-anchor": "end" },
    ),
    T(item.x + 8, item.y + 29, cut(node.prompt, 27, true), 10, p.soft, { "font-family": "ui-monospace, monospace" }),
  );
  g.append(
    sv("line", {
      x1: item.x + 6,
      x2: item.x + (samples.length > 1 ? CARD.w - 6 : 32),
      y1: base,
      y2: base,
      stroke: p.line,
    }),
  );
  samples.forEach((s, i) => g.append(drawBar(step, place, item, s, i, base, p, here)));
  if (samples.length === 1)
    g.append(
      T(item.x + 36, base + 4, cut(samples[0].text, 20), 10.5, p.ink, { "font-family": "ui-monospace, monospace" }),
    );
  g.append(
    sv(
      "title",
      {},
      `node ${node.node}: ${node.role}, turn ${node.turn}` +
        `${node.model === node.role ? "" : `, played by ${node.model}`}, ` +
        `${many(samples.length, "completion")}` +
        `${group ? `, group mean ${num(group.mean)}` : ""}`,
    ),
  );
  return g;
}
function drawBar(step, place, item, s, i, base, p, here) {
  const { x, w } = barX(item, i),
    deviation = step.deviation(s),
    wide = Math.max(1, w - (w > 6 ? 4 : 1)),
    colour = diverging(s.advantage, step.most, p);
  const bar = sv("g", { "data-step": s.step, "data-advantage": s.advantage === null ? "" : s.advantage });
  bar.append(
    sv("rect", {
      x,
      y: base - barReach(item) - 2,
      width: w,
      height: 2 * barReach(item) + 4,
      fill: here.sample === s.step ? p.accent : "#000",
      "fill-opacity": here.sample === s.step ? 0.16 : 0,
    }),
  );
  const left = x + (w - wide) / 2;
  if (!s.valid || deviation === null) {
    bar.append(
      sv("rect", { x: left, y: base - 6, width: wide, height: 12, fill: p.none, "fill-opacity": s.valid ? 0.3 : 0.75 }),
    );
    if (wide > 5)
      bar.append(
        sv("path", { d: `M${left} ${base - 6}l${wide} 12m0 -12l${-wide} 12`, stroke: p.panel, "stroke-width": 1.2 }),
      );
  } else {
    const h = Math.max(5, (Math.abs(deviation) / place.scale) * barReach(item)),
      flat = deviation === 0;
    bar.append(
      sv("rect", {
        x: left,
        y: flat ? base - 2.5 : deviation > 0 ? base - h : base,
        width: wide,
        height: flat ? 5 : h,
        fill: s.trained ? colour : p.panel,
        stroke: colour,
        "stroke-width": s.trained ? 0.5 : 1.8,
        "stroke-dasharray": isOpponent(s) ? "3 2" : null,
      }),
    );
  }
  if (s.truncated) bar.append(T(x + w / 2, item.y + item.h - 2, "\u2702", 8, p.soft, { "text-anchor": "middle" }));
  bar.append(
    sv(
      "title",
      {},
      `completion ${s.step}: return ${num(s.returns)}, advantage ${signed(s.advantage)}, ` +
        `${s.why.replace(/_/g, " ")}${s.truncated ? ", cut off" : ""}`,
    ),
  );
  return bar;
}
function drawEdge(step, place, item, p, path) {
  const from = item.parent,
    heat = place.heatOf.get(item.move);
  let x0, y0;
  if (heat) {
    x0 = heat.x + heat.w;
    y0 = heat.y + heat.h / 2;
  } else {
    const s = item.move.steps.find((v) => v >= 0),
      i = from.samples.findIndex((v) => v.step === s),
      b = barX(from, Math.max(0, i));
    x0 = b.x + b.w / 2;
    y0 = from.y + from.h;
  }
  const x1 = item.x,
    y1 = item.y + item.h / 2,
    corner = from.x + CARD.w + 6,
    on = path.has(item.node.node);
  const d = heat
    ? `M${x0} ${y0}C${x0 + 40} ${y0} ${x1 - 40} ${y1} ${x1} ${y1}`
    : `M${x0} ${y0}q0 7 7 7H${Math.max(x0 + 8, corner - 6)}C${corner + 34} ${y0 + 7} ${x1 - 36} ${y1} ${x1} ${y1}`;
  return sv("path", {
    d,
    fill: "none",
    stroke: on ? p.accent : item.main ? p.ink : p.none,
    "stroke-width": on ? 2.4 : item.main ? 2.2 : 1.1,
    "stroke-opacity": on || item.main ? 1 : 0.75,
  });
}
function drawTie(step, place, tie, p, here) {
  const ends = tie.steps
    .filter((s) => s >= 0)
    .map((s) => {
      const item = place.of.get(step.sample.get(s).node),
        b = barX(
          item,
          item.samples.findIndex((v) => v.step === s),
        );
      return [b.x + b.w / 2, item];
    })
    .sort((a, b) => a[1].y - b[1].y);
  const on = tie.steps.includes(here.sample),
    g = sv("g", {});
  for (let i = 0; i + 1 < ends.length; i++) {
    const [x0, a] = ends[i],
      [x1, b] = ends[i + 1],
      y0 = a.y + a.h,
      y1 = b.y,
      right = a.x + CARD.w;
    // Past other cards a tie goes on the right, where it hides behind none.
    const k = tie.steps.length ? a.samples.findIndex((v) => tie.steps.includes(v.step)) : 0,
      down = barMiddle(a) - 12 + 6 * (k % 5),
      low = barMiddle(b) - 12 + 6 * (k % 5),
      out = right + clamp((low - down) / 8, 14, 52);
    const d =
      a.below && a.below !== b
        ? `M${right} ${down}C${out} ${down} ${out} ${low} ${right} ${low}`
        : `M${x0} ${y0}C${x0} ${(y0 + y1) / 2} ${x1} ${(y0 + y1) / 2} ${x1} ${y1}`;
    g.append(
      sv("path", {
        d,
        fill: "none",
        stroke: on ? p.accent : p.soft,
        "stroke-width": on ? 2.4 : 1.1,
        "stroke-opacity": on ? 1 : 0.6,
      }),
    );
  }
  g.append(sv("title", {}, `joint action ${tie.transition}: reward ${num(step.jointReward(tie))}`));
  return g;
}
function drawHeat(step, heat, p, here) {
  const { rows, columns, size } = heat,
    g = sv("g", {}),
    x0 = heat.x + 26,
    y0 = heat.y + 30;
  const cells = rows.samples.map((a) =>
    columns.samples.map((b) => heat.moves.filter((m) => m.steps.includes(a.step) && m.steps.includes(b.step))),
  );
  const values = cells.map((row) => row.map((list) => mean(list.map((m) => step.jointReward(m))))),
    middle = mean(values.flat());
  const most = Math.max(1e-9, ...values.flat().map((v) => (v === null ? 0 : Math.abs(v - middle))));
  g.append(
    sv("rect", { x: heat.x, y: heat.y, width: heat.w, height: heat.h, rx: 7, fill: p.panel, stroke: p.line }),
    T(heat.x + 8, heat.y + 14, `${rows.node.role} \u2193  \u00d7  ${columns.node.role} \u2192`, 10.5, p.ink),
    T(
      heat.x + 8,
      heat.y + 25,
      `mean ${num(middle)}${heat.seats > 2 ? `, over ${heat.seats - 2} more seats` : ""}`,
      9.5,
      p.soft,
    ),
  );
  values.forEach((row, i) =>
    row.forEach((v, j) => {
      const [a, b] = [rows.samples[i], columns.samples[j]];
      const on = here.sample === a.step || here.sample === b.step;
      g.append(
        sv(
          "rect",
          {
            "data-pick": a.step,
            cursor: "pointer",
            x: x0 + j * size,
            y: y0 + i * size,
            width: size - 1,
            height: size - 1,
            fill: v === null ? p.none : diverging(v - middle, most, p),
            stroke: on ? p.accent : "none",
            "stroke-width": 1.6,
          },
          sv("title", {}, `${a.step} and ${b.step}: reward ${num(v)}`),
        ),
      );
    }),
  );
  return g;
}
