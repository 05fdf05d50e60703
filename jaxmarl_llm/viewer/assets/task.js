// The page of a task: its tree, and beside it the group and the completion that are chosen.
const legend = (step, tree) =>
  el(
    "div",
    { class: "legend" },
    swatch(diverging(-1, 1), "advantage below 0"),
    swatch(diverging(0, 1), "0"),
    swatch(diverging(1, 1), "above 0"),
    el("span", {}, "\u25ae full: trained"),
    el("span", {}, "\u25af hollow: not trained"),
    el("span", {}, "\u2612 grey: unknown"),
    el("span", {}, "\u254e dashed: opponent, script or expert"),
    el("span", {}, `bar: return around the group mean, \u00b1${num(tree.place.scale, 2)}`),
  );

let opened = null; // the tree on the page
function taskView(where, step) {
  const row = step.tasks.find((t) => t.task === where.task);
  if (!row)
    throw new Error(
      `The ${stepName(where.step)} has no task ${where.task}; recorded are ${ranges(step.tasks.map((t) => t.task))}.`,
    );
  const key = `${where.run}.${where.step}.${where.task}.${dark}`;
  if (!opened || opened.key !== key || !document.contains(opened.tree.box)) {
    const tree = new Tree(step, where.task, (node, sample) =>
      go({ run: where.run, step: where.step, task: where.task, node, sample }),
    );
    const failures = step.failures.filter((f) => f.number === row.number),
      note = el("span", { class: "small soft" });
    const all = step.tasks.map((t) => t.task),
      at = all.indexOf(where.task);
    const to = (i, text, label) =>
      el(
        "button",
        {
          type: "button",
          title: label,
          "aria-label": label,
          disabled: !(i in all),
          onclick: () => go({ run: where.run, step: where.step, task: all[i] }),
        },
        text,
      );
    const side = el("aside", { class: "side", "aria-label": "Group and completion" });
    const bar = el(
      "div",
      { class: "bar" },
      to(at - 1, "\u2190", "previous task"),
      el("b", {}, `Task ${row.task}`),
      to(at + 1, "\u2192", "next task"),
      el(
        "span",
        { class: "soft small" },
        `${step.heldOut ? "held-out" : "training"} task no. ${row.number} \u00b7 reward ${num(row.reward)} \u00b7 ` +
          `${many(row.nodes, "prompt")}, ${many(row.completions, "completion")}, ${row.trained} trained` +
          `${row.invalid ? `, ${row.invalid} invalid` : ""}`,
      ),
      el("button", { type: "button", onclick: () => tree.scale(tree.zoom / 1.25), "aria-label": "smaller" }, "\u2212"),
      el("button", { type: "button", onclick: () => tree.scale(tree.zoom * 1.25), "aria-label": "larger" }, "+"),
      el("button", { type: "button", onclick: () => tree.fit() }, "fit"),
      el(
        "button",
        {
          type: "button",
          id: "svg",
          onclick: () => {
            const name = `${stepName(where.step).replace(/ /g, "-")}-task-${where.task}.svg`;
            download(name, tree.export(), "image/svg+xml");
          },
        },
        "SVG",
      ),
      el(
        "button",
        { type: "button", onclick: () => copy(JSON.stringify(taskRows(step, where.task), null, 1), note) },
        "JSON",
      ),
      note,
      failures.map((f) =>
        el("div", { class: "error small" }, `${f.call} failed at turn ${f.turn}: `, el("code", {}, plain(f.message))),
      ),
    );
    const box = el(
      "div",
      { class: "task" },
      el("div", { class: "left" }, bar, el("div", { class: "bar" }, legend(step, tree)), tree.box),
      side,
    );
    $("main").replaceChildren(box);
    opened = { key, tree, side, box };
    tree.box.focus({ preventScroll: true });
  }
  const { tree, side, box } = opened,
    node = step.node.get(where.node),
    sample = step.sample.get(where.sample);
  const shown = node && node.task === where.task ? node : null,
    one = shown && sample && sample.node === node.node ? sample : null;
  box.classList.toggle("open", !!shown);
  side.hidden = !shown;
  side.replaceChildren(
    ...(shown
      ? [
          groupPanel(where, step, shown),
          one ? samplePanel(where, step, shown, one) : transcript(where, step, shown, step.before(shown)),
        ]
      : []),
  );
  side.scrollTop = 0;
  tree.select(shown ? shown.node : null, one ? one.step : null);
  requestAnimationFrame(() => tree.reveal());
  if (shown)
    say(
      `${shown.role}, turn ${shown.turn}, node ${shown.node}, ` +
        `${many(step.samples(shown.node).length, "completion")}` +
        `${one ? `, completion ${one.step}, advantage ${num(one.advantage)}, ${one.why}` : ""}`,
    );
}
// The rows of one task, as they are in the file.
function taskRows(step, task) {
  const nodes = step.nodesOf.get(task) || [],
    steps = nodes.flatMap((n) => step.samples(n.node)),
    groups = new Set(steps.map((s) => s.group));
  return {
    header: step.header,
    nodes,
    steps,
    transitions: step.movesOf.get(task) || [],
    groups: step.groups.filter((g) => groups.has(g.group)),
    memory: nodes.flatMap((n) => step.reads.get(n.node) || []),
  };
}
