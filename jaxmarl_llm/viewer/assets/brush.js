// A range of steps on a curve: dragged over with the pointer, or made with Shift and arrows on the focused curve.
let keyed = null; // {panel, anchor, head}: where the keys are

const within = (range, step) => !range || (step >= range[0] && step <= range[1]);
const rangeOf = (where) =>
  where.from === undefined || where.to === undefined
    ? null
    : [Math.min(where.from, where.to), Math.max(where.from, where.to)];
function choose(range, replace) {
  say(range ? `Steps ${range[0]} to ${range[1]}` : "All steps");
  go(range ? { from: range[0], to: range[1] } : {}, replace);
}

// frame: {X: step -> pixel, left, right, top, bottom, x0, x1, W} of the plot. What is outside of the range is paler.
function shadeOutside(svg, frame, range) {
  const p = palette(),
    [a, b] = range.map((v) => clamp(frame.X(v), frame.left, frame.right)),
    height = frame.bottom - frame.top;
  for (const [from, to] of [
    [frame.left, a],
    [b, frame.right],
  ])
    svg.append(sv("rect", { x: from, y: frame.top, width: to - from, height, fill: p.panel, "fill-opacity": 0.75 }));
  for (const x of [a, b])
    svg.append(sv("line", { x1: x, x2: x, y1: frame.top, y2: frame.bottom, stroke: p.accent, "stroke-width": 1.5 }));
}

// panel: name of the curve on the page. marks: recorded steps. pick(step): opens the step.
function brush(svg, frame, { panel, marks, pick }) {
  const p = palette(),
    { X, left, right, top, bottom, x0, x1, W } = frame;
  const hover = sv("line", { y1: top, y2: bottom, stroke: p.accent, "stroke-dasharray": "3 3", visibility: "hidden" });
  const label = sv("text", { y: top + 10, "font-size": 11, fill: p.accent, visibility: "hidden" });
  const drag = sv("rect", { y: top, height: bottom - top, fill: p.accent, "fill-opacity": 0.18, visibility: "hidden" });
  svg.append(drag, hover, label);
  fill(svg, { tabindex: 0, "data-panel": panel, style: "cursor:pointer;touch-action:pan-y" }, []);

  const stepAt = (x) => {
    const box = svg.getBoundingClientRect(),
      at = x0 + ((((x - box.left) / box.width) * W - left) / (right - left)) * (x1 - x0);
    return clamp(at, x0, x1);
  };
  const nearest = (at) => marks.reduce((a, b) => (Math.abs(b - at) < Math.abs(a - at) ? b : a));
  const show = (visible, ...parts) =>
    parts.forEach((n) => n.setAttribute("visibility", visible ? "visible" : "hidden"));
  const point = (x, text) => {
    const far = x > W * 0.7;
    fill(hover, { x1: x, x2: x }, []);
    fill(label, { x: x + (far ? -5 : 5), "text-anchor": far ? "end" : "start" }, []);
    label.textContent = text;
    show(true, hover, label);
  };
  const pointMark = (m) => point(X(m), `open step ${m}`);

  let start = null; // pixel where a drag began
  const far = (event) => Math.abs(event.clientX - start) >= 4;
  const span = (event) => [stepAt(start), stepAt(event.clientX)].map(Math.round).sort((a, b) => a - b);
  const end = () => {
    start = null;
    show(false, drag, hover, label);
  };
  const on = {
    pointerdown: (event) => {
      if (event.button !== 0) return;
      start = event.clientX;
      svg.setPointerCapture(event.pointerId);
    },
    pointermove: (event) => {
      if (start === null) return pointMark(nearest(stepAt(event.clientX)));
      if (!far(event)) return;
      const [a, b] = span(event);
      fill(drag, { x: X(a), width: Math.max(1, X(b) - X(a)) }, []);
      point(X(stepAt(event.clientX)), `steps ${a} to ${b}`);
      show(true, drag);
    },
    pointerup: (event) => {
      if (start === null) return;
      const chosen = far(event) ? span(event) : null;
      end();
      if (chosen) choose(chosen);
      else pick(nearest(stepAt(event.clientX)));
    },
    pointercancel: end,
    pointerleave: () => start === null && show(false, hover, label),
    blur: () => show(false, hover, label),
    focus: () => keyed && keyed.panel === panel && pointMark(keyed.head),
    keydown: (event) => brushKey(event, panel, marks, pick, pointMark),
  };
  for (const [kind, act] of Object.entries(on)) svg.addEventListener(kind, act);
}
// Arrows go from one recorded step to the next; with Shift they stretch a range from where it began; Enter opens.
function brushKey(event, panel, marks, pick, point) {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by && event.key !== "Enter") return;
  event.preventDefault();
  event.stopPropagation();
  const last = marks[marks.length - 1];
  if (!keyed || keyed.panel !== panel || !marks.includes(keyed.head)) keyed = { panel, anchor: last, head: last };
  if (event.key === "Enter") return pick(keyed.head);
  keyed.head = marks[clamp(marks.indexOf(keyed.head) + by, 0, marks.length - 1)];
  if (!event.shiftKey) {
    keyed.anchor = keyed.head;
    return point(keyed.head);
  }
  choose([Math.min(keyed.anchor, keyed.head), Math.max(keyed.anchor, keyed.head)], true);
}
