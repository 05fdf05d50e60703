// View 3: the tree of a task. Only what is in sight is drawn, so that a tree of 10,000 prompts scrolls.
const T = (x, y, text, size, fill, more) => sv("text", { x, y, "font-size": size, fill, "font-family": "system-ui, sans-serif", ...more }, text);

function drawNode(step, place, item, p, here) {
  const { node, samples, group } = item, opponent = samples.some(isOpponent), base = barMiddle(item);
  const g = sv("g", { "data-node": node.node, cursor: "pointer" });
  g.append(sv("rect", { x: item.x, y: item.y, width: CARD.w, height: item.h, rx: 7, fill: p.panel, stroke: here.node === node.node ? p.accent : group && group.selected ? p.soft : p.line,
    "stroke-width": here.node === node.node ? 2.6 : item.main ? 2 : 1, "stroke-dasharray": opponent ? "5 4" : null }));
  const several = group && group.size > 1;
  g.append(T(item.x + 8, item.y + 15, `#${node.node}`, 11, p.ink, { "font-weight": 650 }),
    T(item.x + CARD.w - 8, item.y + 15, several ? (group.low === group.high ? "all equal" : `\u03c3\u00b2 ${num(group.variance, 2)}`) : "", 10.5, p.soft, { "text-anchor": "end" }),
    T(item.x + 8, item.y + 29, cut(node.prompt, 27, true), 10, p.soft, { "font-family": "ui-monospace, monospace" }));
  g.append(sv("line", { x1: item.x + 6, x2: item.x + (samples.length > 1 ? CARD.w - 6 : 32), y1: base, y2: base, stroke: p.line }));
  samples.forEach((s, i) => g.append(drawBar(step, place, item, s, i, base, p, here)));
  if (samples.length === 1) g.append(T(item.x + 36, base + 4, cut(samples[0].text, 20), 10.5, p.ink, { "font-family": "ui-monospace, monospace" }));
  g.append(sv("title", {}, `node ${node.node}: ${node.role}, turn ${node.turn}${node.model === node.role ? "" : `, played by ${node.model}`}, ${many(samples.length, "completion")}${group ? `, group mean ${num(group.mean)}` : ""}`));
  return g;
}
function drawBar(step, place, item, s, i, base, p, here) {
  const { x, w } = barX(item, i), deviation = step.deviation(s), wide = Math.max(1, w - (w > 6 ? 4 : 1)), colour = diverging(s.advantage, step.most, p);
  const bar = sv("g", { "data-step": s.step, "data-advantage": s.advantage === null ? "" : s.advantage });
  bar.append(sv("rect", { x, y: base - barReach(item) - 2, width: w, height: 2 * barReach(item) + 4, fill: here.sample === s.step ? p.accent : "#000", "fill-opacity": here.sample === s.step ? 0.16 : 0 }));
  const left = x + (w - wide) / 2;
  if (!s.valid || deviation === null) {
    bar.append(sv("rect", { x: left, y: base - 6, width: wide, height: 12, fill: p.none, "fill-opacity": s.valid ? 0.3 : 0.75 }));
    if (wide > 5) bar.append(sv("path", { d: `M${left} ${base - 6}l${wide} 12m0 -12l${-wide} 12`, stroke: p.panel, "stroke-width": 1.2 }));
  } else {
    const h = Math.max(5, Math.abs(deviation) / place.scale * barReach(item)), flat = deviation === 0;
    bar.append(sv("rect", { x: left, y: flat ? base - 2.5 : deviation > 0 ? base - h : base, width: wide, height: flat ? 5 : h, fill: s.trained ? colour : p.panel, stroke: colour, "stroke-width": s.trained ? 0.5 : 1.8, "stroke-dasharray": isOpponent(s) ? "3 2" : null }));
  }
  if (s.truncated) bar.append(T(x + w / 2, item.y + item.h - 2, "\u2702", 8, p.soft, { "text-anchor": "middle" }));
  bar.append(sv("title", {}, `completion ${s.step}: return ${num(s.returns)}, advantage ${signed(s.advantage)}, ${s.why.replace(/_/g, " ")}${s.truncated ? ", cut off" : ""}`));
  return bar;
}
function drawEdge(step, place, item, p, path) {
  const from = item.parent, heat = place.heatOf.get(item.move);
  let x0, y0;
  if (heat) { x0 = heat.x + heat.w; y0 = heat.y + heat.h / 2; } else {
    const s = item.move.steps.find((v) => v >= 0), i = from.samples.findIndex((v) => v.step === s), b = barX(from, Math.max(0, i));
    x0 = b.x + b.w / 2; y0 = from.y + from.h;
  }
  const x1 = item.x, y1 = item.y + item.h / 2, corner = from.x + CARD.w + 6, on = path.has(item.node.node);
  const d = heat ? `M${x0} ${y0}C${x0 + 40} ${y0} ${x1 - 40} ${y1} ${x1} ${y1}` : `M${x0} ${y0}q0 7 7 7H${Math.max(x0 + 8, corner - 6)}C${corner + 34} ${y0 + 7} ${x1 - 36} ${y1} ${x1} ${y1}`;
  return sv("path", { d, fill: "none", stroke: on ? p.accent : item.main ? p.ink : p.none, "stroke-width": on ? 2.4 : item.main ? 2.2 : 1.1, "stroke-opacity": on || item.main ? 1 : 0.75 });
}
function drawTie(step, place, tie, p, here) {
  const ends = tie.steps.filter((s) => s >= 0).map((s) => { const item = place.of.get(step.sample.get(s).node), b = barX(item, item.samples.findIndex((v) => v.step === s)); return [b.x + b.w / 2, item]; }).sort((a, b) => a[1].y - b[1].y);
  const on = tie.steps.includes(here.sample), g = sv("g", {});
  for (let i = 0; i + 1 < ends.length; i++) {
    const [x0, a] = ends[i], [x1, b] = ends[i + 1], y0 = a.y + a.h, y1 = b.y, right = a.x + CARD.w;
    // Past other cards a tie goes on the right, where it hides behind none.
    const k = tie.steps.length ? a.samples.findIndex((v) => tie.steps.includes(v.step)) : 0, down = barMiddle(a) - 12 + 6 * (k % 5), low = barMiddle(b) - 12 + 6 * (k % 5), out = right + clamp((low - down) / 8, 14, 52);
    const d = a.below && a.below !== b ? `M${right} ${down}C${out} ${down} ${out} ${low} ${right} ${low}` : `M${x0} ${y0}C${x0} ${(y0 + y1) / 2} ${x1} ${(y0 + y1) / 2} ${x1} ${y1}`;
    g.append(sv("path", { d, fill: "none", stroke: on ? p.accent : p.soft, "stroke-width": on ? 2.4 : 1.1, "stroke-opacity": on ? 1 : 0.6 }));
  }
  g.append(sv("title", {}, `joint action ${tie.transition}: reward ${num(step.jointReward(tie))}`));
  return g;
}
function drawHeat(step, heat, p, here) {
  const { rows, columns, size } = heat, g = sv("g", {}), x0 = heat.x + 26, y0 = heat.y + 30;
  const cells = rows.samples.map((a) => columns.samples.map((b) => heat.moves.filter((m) => m.steps.includes(a.step) && m.steps.includes(b.step))));
  const values = cells.map((row) => row.map((list) => mean(list.map((m) => step.jointReward(m))))), middle = mean(values.flat());
  const most = Math.max(1e-9, ...values.flat().map((v) => v === null ? 0 : Math.abs(v - middle)));
  g.append(sv("rect", { x: heat.x, y: heat.y, width: heat.w, height: heat.h, rx: 7, fill: p.panel, stroke: p.line }),
    T(heat.x + 8, heat.y + 14, `${rows.node.role} \u2193  \u00d7  ${columns.node.role} \u2192`, 10.5, p.ink),
    T(heat.x + 8, heat.y + 25, `mean ${num(middle)}${heat.seats > 2 ? `, over ${heat.seats - 2} more seats` : ""}`, 9.5, p.soft));
  values.forEach((row, i) => row.forEach((v, j) => {
    const [a, b] = [rows.samples[i], columns.samples[j]];
    const on = here.sample === a.step || here.sample === b.step;
    g.append(sv("rect", { "data-pick": a.step, cursor: "pointer", x: x0 + j * size, y: y0 + i * size, width: size - 1, height: size - 1, fill: v === null ? p.none : diverging(v - middle, most, p), stroke: on ? p.accent : "none", "stroke-width": 1.6 },
      sv("title", {}, `${a.step} and ${b.step}: reward ${num(v)}`)));
  }));
  return g;
}

class Tree {
  // pick(node, sample): called when the reader chooses.
  constructor(step, task, pick) {
    Object.assign(this, { step, task, pick, place: layout(step, task), here: {}, path: new Set(), zoom: 1, drawn: new Map(), asked: false });
    this.layers = ["bands", "edges", "nodes", "heads"].map((name) => sv("g", { class: name }));
    this.svg = sv("svg", { role: "img", "aria-label": `Tree of task ${task}: ${many(this.place.items.length, "prompt")}` }, this.layers);
    this.spacer = el("div", { class: "spacer" }, this.svg);
    this.box = el("div", { class: "treebox", tabindex: 0, role: "group", "aria-label": "Tree: arrows move, Enter opens" }, this.spacer);
    this.box.addEventListener("scroll", () => this.ask());
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.svg.addEventListener("click", (event) => {
      const at = (name) => { const found = event.target.closest(`[${name}]`); return found ? +found.getAttribute(name) : null; };
      const sample = at("data-step") ?? at("data-pick"), node = sample !== null ? step.sample.get(sample).node : at("data-node");
      if (node !== null) pick(node, sample);
    });
    this.box.addEventListener("wheel", (event) => { if (event.ctrlKey) { event.preventDefault(); this.scale(this.zoom * (event.deltaY < 0 ? 1.15 : 1 / 1.15)); } }, { passive: false });
    new ResizeObserver(() => this.ask(true)).observe(this.box);
  }
  scale(zoom) {
    const kept = [this.box.scrollLeft / this.zoom, this.box.scrollTop / this.zoom];
    this.zoom = clamp(zoom, 0.2, 2.5);
    this.ask(true);
    this.box.scrollTo(kept[0] * this.zoom, kept[1] * this.zoom);
  }
  fit(least = 0.2) { this.scale(Math.max(least, Math.min(1, this.box.clientWidth / this.place.width, this.box.clientHeight / this.place.height))); }
  select(node, sample) {
    this.here = { node, sample };
    const path = new Set();
    for (let item = this.place.of.get(node); item; item = item.parent) path.add(item.node.node);
    this.path = path;
    this.ask(true);
  }
  reveal() {
    const item = this.place.of.get(this.here.node), { box, zoom: z } = this;
    if (!item || !box.clientWidth) return;
    const pad = 24, left = item.x * z, right = (item.x + CARD.w) * z, top = item.y * z, low = (item.y + item.h) * z;
    if (left - CARD.left < box.scrollLeft) box.scrollLeft = left - CARD.left - pad; else if (right > box.scrollLeft + box.clientWidth) box.scrollLeft = right - box.clientWidth + pad;
    if (top - CARD.head < box.scrollTop) box.scrollTop = top - CARD.head - pad; else if (low > box.scrollTop + box.clientHeight) box.scrollTop = low - box.clientHeight + pad;
  }
  ask(anew) {
    if (anew) this.stale = true;
    if (!this.asked) { this.asked = true; requestAnimationFrame(() => { this.asked = false; this.draw(); }); }
  }
  draw() {
    const { box, place, step, zoom: z, layers: [bands, edges, nodes, heads] } = this, p = palette(), W = box.clientWidth, H = box.clientHeight;
    if (!W || !H) return;
    this.spacer.style.width = `${Math.max(W, place.width * z)}px`;
    this.spacer.style.height = `${Math.max(H, place.height * z)}px`;
    this.svg.setAttribute("width", W); this.svg.setAttribute("height", H);
    const x = box.scrollLeft / z, y = box.scrollTop / z, w = W / z, h = H / z, far = 60;
    const seen = (a, top, wide, high) => a + wide > x - far && a < x + w + far && top + high > y - far && top < y + h + far;
    if (this.stale) { this.drawn.clear(); nodes.replaceChildren(); this.stale = false; }
    const shown = new Set();
    for (const item of place.items) if (seen(item.x, item.y, CARD.w, item.h)) {
      shown.add(item);
      if (!this.drawn.has(item)) { const g = drawNode(step, place, item, p, this.here); this.drawn.set(item, g); nodes.append(g); }
    }
    for (const heat of place.heats) if (seen(heat.x, heat.y, heat.w, heat.h)) {
      shown.add(heat);
      if (!this.drawn.has(heat)) { const g = drawHeat(step, heat, p, this.here); this.drawn.set(heat, g); nodes.append(g); }
    }
    for (const [item, g] of this.drawn) if (!shown.has(item)) { g.remove(); this.drawn.delete(item); }
    const lines = [], ties = new Set();
    for (const item of shown) {
      if (item.parent) lines.push(item);
      for (const child of (item.children || []).slice(0, 60)) if (!shown.has(child)) lines.push(child);
      for (const tie of item.ties || []) ties.add(tie);
    }
    edges.replaceChildren(...lines.map((item) => drawEdge(step, place, item, p, this.path)), ...[...ties].map((tie) => drawTie(step, place, tie, p, this.here)));
    for (const g of [edges, nodes]) g.setAttribute("transform", `scale(${z}) translate(${-x} ${-y})`);
    bands.setAttribute("transform", `scale(${z}) translate(0 ${-y})`);
    bands.replaceChildren(...place.lanes.map((lane, i) => sv("rect", { x: 0, y: lane.y, width: w, height: lane.h, fill: i % 2 ? p.bg : p.band })));
    heads.replaceChildren(
      sv("rect", { x: 0, y: 0, width: Math.min(92, 100 * z), height: H, fill: p.bg, "fill-opacity": 0.96 }),
      ...place.lanes.filter((lane) => lane.y < y + h && lane.y + lane.h > y).map((lane) => sv("g", {},
        sv("rect", { x: 0, y: (lane.y - y) * z, width: 5, height: lane.h * z, fill: lane.colour }),
        T(12, clamp(42, (lane.y - y) * z + 18, Math.max((lane.y - y) * z + 18, (lane.y + lane.h - y) * z - 8)), cut(lane.name, Math.round(clamp(12 * z, 3, 12))), 12, p.ink, { "font-weight": 650 }))),
      sv("rect", { x: 0, y: 0, width: W, height: 24, fill: p.bg, "fill-opacity": 0.92 }),
      ...place.turns.map((turn, i) => [turn, (CARD.left + i * (CARD.w + CARD.gap) - x) * z]).filter(([, at]) => at > -90 && at < W).map(([turn, at]) => T(at + 2, 16, `turn ${turn}`, 12, p.soft, { "font-weight": 600 })));
  }
  // Arrows: to the parent, to a child, and up or down within the column. Enter: the first completion.
  key(event) {
    const { place } = this, item = place.of.get(this.here.node), column = (turn) => place.items.filter((o) => o.node.turn === turn).sort((a, b) => a.y - b.y);
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    let to = null;
    if (event.key === "+" || event.key === "=") return this.scale(this.zoom * 1.25);
    if (event.key === "-") return this.scale(this.zoom / 1.25);
    if (event.key === "0") return this.fit();
    if (!["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Enter"].includes(event.key)) return;
    event.preventDefault();
    if (!item) to = place.items[0];
    else if (event.key === "ArrowLeft") to = item.parent;
    else if (event.key === "ArrowRight") to = item.children.find((c) => c.main) || item.children[0];
    else if (event.key === "Enter") { if (item.samples.length) this.pick(item.node.node, item.samples[0].step); return; }
    else { const list = column(item.node.turn); to = list[list.indexOf(item) + (event.key === "ArrowDown" ? 1 : -1)]; }
    if (to) this.pick(to.node.node, null);
  }
  // The whole tree as a file for papers, in light colours.
  export() {
    const { step, place } = this, p = PALETTES.light, svg = sv("svg", { xmlns: NS, width: place.width, height: place.height, viewBox: `0 0 ${place.width} ${place.height}` });
    svg.append(sv("rect", { width: place.width, height: place.height, fill: "#ffffff" }));
    place.lanes.forEach((lane, i) => svg.append(sv("rect", { x: 0, y: lane.y, width: place.width, height: lane.h, fill: i % 2 ? "#ffffff" : p.band }), sv("rect", { x: 0, y: lane.y, width: 5, height: lane.h, fill: lane.colour }), T(12, lane.y + 18, lane.name, 12, p.ink)));
    place.turns.forEach((turn, i) => svg.append(T(CARD.left + i * (CARD.w + CARD.gap), 18, `turn ${turn}`, 12, p.soft)));
    for (const item of place.items) if (item.parent) svg.append(drawEdge(step, place, item, p, new Set()));
    for (const tie of place.ties) svg.append(drawTie(step, place, tie, p, {}));
    for (const item of place.items) svg.append(drawNode(step, place, item, p, {}));
    for (const heat of place.heats) svg.append(drawHeat(step, heat, p, {}));
    return new XMLSerializer().serializeToString(svg);
  }
}
