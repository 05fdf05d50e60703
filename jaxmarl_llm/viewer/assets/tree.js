// View 3: the tree of a task. Only what is in sight is drawn, so that a tree of 10,000 prompts scrolls.
class Tree {
  // pick(node, sample): called when the reader chooses.
  constructor(step, task, pick) {
    Object.assign(this, {
      step,
      task,
      pick,
      place: layout(step, task),
      here: {},
      path: new Set(),
      zoom: 1,
      drawn: new Map(),
      asked: false,
    });
    this.layers = ["bands", "edges", "nodes", "heads"].map((name) => sv("g", { class: name }));
    this.svg = sv(
      "svg",
      { role: "img", "aria-label": `Tree of task ${task}: ${many(this.place.items.length, "prompt")}` },
      this.layers,
    );
    this.spacer = el("div", { class: "spacer" }, this.svg);
    this.box = el(
      "div",
      { class: "treebox", tabindex: 0, role: "group", "aria-label": "Tree: arrows move, Enter opens" },
      this.spacer,
    );
    this.box.addEventListener("scroll", () => this.ask());
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.svg.addEventListener("click", (event) => {
      const at = (name) => {
        const found = event.target.closest(`[${name}]`);
        return found ? +found.getAttribute(name) : null;
      };
      const sample = at("data-step") ?? at("data-pick"),
        node = sample !== null ? step.sample.get(sample).node : at("data-node");
      if (node !== null) pick(node, sample);
    });
    this.box.addEventListener(
      "wheel",
      (event) => {
        if (event.ctrlKey) {
          event.preventDefault();
          this.scale(this.zoom * (event.deltaY < 0 ? 1.15 : 1 / 1.15));
        }
      },
      { passive: false },
    );
    new ResizeObserver(() => this.ask(true)).observe(this.box);
  }
  scale(zoom) {
    const kept = [this.box.scrollLeft / this.zoom, this.box.scrollTop / this.zoom];
    this.zoom = clamp(zoom, 0.2, 2.5);
    this.ask(true);
    this.box.scrollTo(kept[0] * this.zoom, kept[1] * this.zoom);
  }
  fit(least = 0.2) {
    this.scale(
      Math.max(least, Math.min(1, this.box.clientWidth / this.place.width, this.box.clientHeight / this.place.height)),
    );
  }
  select(node, sample) {
    this.here = { node, sample };
    const path = new Set();
    for (let item = this.place.of.get(node); item; item = item.parent) path.add(item.node.node);
    this.path = path;
    this.ask(true);
  }
  reveal() {
    const item = this.place.of.get(this.here.node),
      { box, zoom: z } = this;
    if (!item || !box.clientWidth) return;
    const pad = 24,
      left = item.x * z,
      right = (item.x + CARD.w) * z,
      top = item.y * z,
      low = (item.y + item.h) * z;
    if (left - CARD.left < box.scrollLeft) box.scrollLeft = left - CARD.left - pad;
    else if (right > box.scrollLeft + box.clientWidth) box.scrollLeft = right - box.clientWidth + pad;
    if (top - CARD.head < box.scrollTop) box.scrollTop = top - CARD.head - pad;
    else if (low > box.scrollTop + box.clientHeight) box.scrollTop = low - box.clientHeight + pad;
  }
  ask(anew) {
    if (anew) this.stale = true;
    if (!this.asked) {
      this.asked = true;
      requestAnimationFrame(() => {
        this.asked = false;
        this.draw();
      });
    }
  }
  draw() {
    const {
        box,
        place,
        step,
        zoom: z,
        layers: [bands, edges, nodes, heads],
      } = this,
      p = palette(),
      W = box.clientWidth,
      H = box.clientHeight;
    if (!W || !H) return;
    this.spacer.style.width = `${Math.max(W, place.width * z)}px`;
    this.spacer.style.height = `${Math.max(H, place.height * z)}px`;
    this.svg.setAttribute("width", W);
    this.svg.setAttribute("height", H);
    const x = box.scrollLeft / z,
      y = box.scrollTop / z,
      w = W / z,
      h = H / z,
      far = 60;
    const seen = (a, top, wide, high) =>
      a + wide > x - far && a < x + w + far && top + high > y - far && top < y + h + far;
    if (this.stale) {
      this.drawn.clear();
      nodes.replaceChildren();
      this.stale = false;
    }
    const shown = new Set();
    for (const item of place.items)
      if (seen(item.x, item.y, CARD.w, item.h)) {
        shown.add(item);
        if (!this.drawn.has(item)) {
          const g = drawNode(step, place, item, p, this.here);
          this.drawn.set(item, g);
          nodes.append(g);
        }
      }
    for (const heat of place.heats)
      if (seen(heat.x, heat.y, heat.w, heat.h)) {
        shown.add(heat);
        if (!this.drawn.has(heat)) {
          const g = drawHeat(step, heat, p, this.here);
          this.drawn.set(heat, g);
          nodes.append(g);
        }
      }
    for (const [item, g] of this.drawn)
      if (!shown.has(item)) {
        g.remove();
        this.drawn.delete(item);
      }
    const lines = [],
      ties = new Set();
    for (const item of shown) {
      if (item.parent) lines.push(item);
      for (const child of (item.children || []).slice(0, 60)) if (!shown.has(child)) lines.push(child);
      for (const tie of item.ties || []) ties.add(tie);
    }
    edges.replaceChildren(
      ...lines.map((item) => drawEdge(step, place, item, p, this.path)),
      ...[...ties].map((tie) => drawTie(step, place, tie, p, this.here)),
    );
    for (const g of [edges, nodes]) g.setAttribute("transform", `scale(${z}) translate(${-x} ${-y})`);
    bands.setAttribute("transform", `scale(${z}) translate(0 ${-y})`);
    bands.replaceChildren(
      ...place.lanes.map((lane, i) =>
        sv("rect", { x: 0, y: lane.y, width: w, height: lane.h, fill: i % 2 ? p.bg : p.band }),
      ),
    );
    heads.replaceChildren(
      sv("rect", { x: 0, y: 0, width: Math.min(92, 100 * z), height: H, fill: p.bg, "fill-opacity": 0.96 }),
      ...place.lanes
        .filter((lane) => lane.y < y + h && lane.y + lane.h > y)
        .map((lane) =>
          sv(
            "g",
            {},
            sv("rect", { x: 0, y: (lane.y - y) * z, width: 5, height: lane.h * z, fill: lane.colour }),
            T(
              12,
              clamp(42, (lane.y - y) * z + 18, Math.max((lane.y - y) * z + 18, (lane.y + lane.h - y) * z - 8)),
              cut(lane.name, Math.round(clamp(12 * z, 3, 12))),
              12,
              p.ink,
              { "font-weight": 650 },
            ),
          ),
        ),
      sv("rect", { x: 0, y: 0, width: W, height: 24, fill: p.bg, "fill-opacity": 0.92 }),
      ...place.turns
        .map((turn, i) => [turn, (CARD.left + i * (CARD.w + CARD.gap) - x) * z])
        .filter(([, at]) => at > -90 && at < W)
        .map(([turn, at]) => T(at + 2, 16, `turn ${turn}`, 12, p.soft, { "font-weight": 600 })),
    );
  }
  // Arrows: to the parent, to a child, and up or down within the column. Enter: the first completion.
  key(event) {
    const { place } = this,
      item = place.of.get(this.here.node),
      column = (turn) => place.items.filter((o) => o.node.turn === turn).sort((a, b) => a.y - b.y);
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
    else if (event.key === "Enter") {
      if (item.samples.length) this.pick(item.node.node, item.samples[0].step);
      return;
    } else {
      const list = column(item.node.turn);
      to = list[list.indexOf(item) + (event.key === "ArrowDown" ? 1 : -1)];
    }
    if (to) this.pick(to.node.node, null);
  }
  // The whole tree as a file for papers, in light colours.
  export() {
    const { step, place } = this,
      p = PALETTES.light,
      svg = sv("svg", {
        xmlns: NS,
        width: place.width,
        height: place.height,
        viewBox: `0 0 ${place.width} ${place.height}`,
      });
    svg.append(sv("rect", { width: place.width, height: place.height, fill: "#ffffff" }));
    place.lanes.forEach((lane, i) =>
      svg.append(
        sv("rect", { x: 0, y: lane.y, width: place.width, height: lane.h, fill: i % 2 ? "#ffffff" : p.band }),
        sv("rect", { x: 0, y: lane.y, width: 5, height: lane.h, fill: lane.colour }),
        T(12, lane.y + 18, lane.name, 12, p.ink),
      ),
    );
    place.turns.forEach((turn, i) =>
      svg.append(T(CARD.left + i * (CARD.w + CARD.gap), 18, `turn ${turn}`, 12, p.soft)),
    );
    for (const item of place.items) if (item.parent) svg.append(drawEdge(step, place, item, p, new Set()));
    for (const tie of place.ties) svg.append(drawTie(step, place, tie, p, {}));
    for (const item of place.items) svg.append(drawNode(step, place, item, p, {}));
    for (const heat of place.heats) svg.append(drawHeat(step, heat, p, {}));
    return new XMLSerializer().serializeToString(svg);
  }
}
