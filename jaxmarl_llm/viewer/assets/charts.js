// Curves and bars as SVG.
function ticks(low, high, count = 4) {
  const span = high - low || Math.abs(high) || 1,
    raw = span / count,
    power = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= raw) || raw,
    out = [];
  for (let v = Math.ceil(low / size - 1e-9) * size; v <= high + size * 1e-9 && out.length < 20; v += size)
    out.push(+v.toPrecision(12));
  return out;
}
// lines: [{name, colour, steps, values}]; marks: steps that are recorded; pick(step): called for the nearest one.
// range: steps of the axis; chosen: steps that are not shaded, or null; panel: name of the curve on the page.
function curve({ title, unit, lines, marks, pick, range, chosen, panel }) {
  const W = 360,
    H = 178,
    left = 42,
    right = 8,
    top = 8,
    bottom = 26,
    p = palette();
  const xs = lines.flatMap((l) => l.steps),
    ys = lines.flatMap((l) => l.values);
  let x0 = Math.min(...xs, ...(range ? [range[0]] : [])),
    x1 = Math.max(...xs, ...(range ? [range[1]] : [])),
    y0 = Math.min(...ys),
    y1 = Math.max(...ys);
  if (x0 === x1) x1 = x0 + 1;
  if (unit === "share") {
    y0 = 0;
    y1 = 1;
  } else if (y0 === y1) {
    y0 -= 0.5;
    y1 += 0.5;
  } else {
    const pad = (y1 - y0) * 0.06;
    y0 -= pad;
    y1 += pad;
  }
  const X = (v) => left + ((v - x0) / (x1 - x0)) * (W - left - right),
    Y = (v) => H - bottom - ((v - y0) / (y1 - y0)) * (H - top - bottom);
  const svg = sv("svg", {
    viewBox: `0 0 ${W} ${H}`,
    role: marks.length ? "group" : "img",
    "aria-label": `${title}: ${lines.map((l) => `${l.name} ends at ${num(l.values[l.values.length - 1])}`).join(", ")}`,
  });
  for (const v of ticks(y0, y1))
    svg.append(
      sv("line", { x1: left, x2: W - right, y1: Y(v), y2: Y(v), stroke: p.line }),
      sv("text", { x: left - 5, y: Y(v) + 4, "text-anchor": "end", "font-size": 10.5, fill: p.soft }, num(v)),
    );
  for (const v of ticks(x0, x1))
    svg.append(
      sv("text", { x: X(v), y: H - bottom + 20, "text-anchor": "middle", "font-size": 10.5, fill: p.soft }, String(v)),
    );
  for (const m of marks)
    svg.append(
      sv("line", { x1: X(m), x2: X(m), y1: H - bottom, y2: H - bottom + 6, stroke: p.accent, "stroke-width": 1.4 }),
    );
  for (const l of lines) {
    const points = l.steps.map((s, i) => `${X(s).toFixed(1)},${Y(l.values[i]).toFixed(1)}`).join(" ");
    const long = l.steps.length > 60,
      smooth = long ? l.values.map((_, i) => mean(l.values.slice(Math.max(0, i - 9), i + 10))) : l.values;
    if (long)
      svg.append(
        sv("polyline", { points, fill: "none", stroke: l.colour, "stroke-width": 0.8, "stroke-opacity": 0.28 }),
      );
    if (l.steps.length > 1)
      svg.append(
        sv("polyline", {
          points: l.steps.map((s, i) => `${X(s).toFixed(1)},${Y(smooth[i]).toFixed(1)}`).join(" "),
          fill: "none",
          stroke: l.colour,
          "stroke-width": 1.7,
          "stroke-linejoin": "round",
        }),
      );
    if (l.steps.length < 30)
      l.steps.forEach((s, i) => svg.append(sv("circle", { cx: X(s), cy: Y(l.values[i]), r: 2.4, fill: l.colour })));
  }
  const frame = { X, left, right: W - right, top, bottom: H - bottom, x0, x1, W };
  if (chosen) shadeOutside(svg, frame, chosen);
  if (marks.length) brush(svg, frame, { panel, marks, pick });
  return svg;
}
const swatch = (colour, text) => el("span", {}, el("span", { class: "swatch", style: `background:${colour}` }), text);
