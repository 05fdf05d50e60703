// View 5: two tasks side by side: of two steps, of two evaluations, or of two runs.
// The pair of an address without steps: held-out tasks at the newest evaluations of two runs, or at the first and the
// newest evaluation of one run. Without evaluations: the first and the newest step. What `evaluate` wrote of a run is
// no other run.
function pairOf(where) {
  const one = { run: where.run, step: where.step, task: where.task ?? 0 },
    other = { run: where.run2 ?? where.run, step: where.step2, task: where.task2 ?? where.task ?? 0 },
    evaluations = (r) => (index.runs[r] ? index.runs[r].held_out : []);
  if (one.step === undefined && other.step === undefined) {
    const beside = index.runs.findIndex((run, r) => r !== one.run && !run.evaluated && run.held_out.length),
      second = where.run2 ?? (beside < 0 ? one.run : beside),
      [a, b] = [evaluations(one.run), evaluations(second)];
    if (a.length && b.length && (second !== one.run || a.length > 1))
      return [
        { ...one, step: second === one.run ? a[0] : a.slice(-1)[0] },
        { ...other, run: second, step: b.slice(-1)[0] },
      ];
  }
  one.step ??= everyStep(index.runs[one.run])[0];
  other.step ??= likeStep(index.runs[other.run], one.step).slice(-1)[0];
  return [one, other];
}
// The row of the same task among the rows of a step: of equal content, and of equal number where several have it.
// Where a content is unknown the number tells, among tasks of the same split.
function twinOf(side, step, rows) {
  const { content, number } = side.row,
    same = (t) =>
      content && t.content
        ? t.content === content
        : t.number === number && isEvaluation(side.step) === isEvaluation(step);
  const found = rows.filter(same);
  return found.find((t) => t.number === number) || found[0];
}
async function compareView(where) {
  const found = await Promise.all(
    pairOf(where).map(async (side) => {
      if (!index.runs[side.run]) throw new Error(`There is no run ${side.run}.`);
      const step = await load(side.run, side.step),
        row = step.tasks.find((t) => t.task === side.task) || step.tasks[0];
      if (!row) throw new Error(`The ${stepName(side.step)} has no task.`);
      return { ...side, task: row.task, made: step, row };
    }),
  );
  if (where.task2 === undefined) {
    // the same task, where the right step has it; without a task in the address, the first one that both have
    const [left, right] = found,
      rows = where.task === undefined ? left.made.tasks : [left.row],
      twin = (row) => twinOf({ ...left, row }, right.step, right.made.tasks),
      row = rows.find(twin);
    if (row) {
      Object.assign(left, { task: row.task, row });
      Object.assign(right, { task: twin(row).task, row: twin(row) });
    }
  }
  const to = (k, change) => {
    const s = found.map((f) => ({ run: f.run, step: f.step, task: f.task }));
    Object.assign(s[k], change);
    go({ view: "compare", ...s[0], run2: s[1].run, step2: s[1].step, task2: s[1].task });
  };
  const choose = (label, values, now, names, pick) =>
    el(
      "select",
      { "aria-label": label, onchange: (e) => pick(values[e.target.selectedIndex]) },
      values.map((v, i) => el("option", { value: v, selected: v === now }, names[i])),
    );
  const trees = [];
  const panes = found.map((side, k) => {
    const run = index.runs[side.run],
      tree = new Tree(side.made, side.task, (node, sample) =>
        go({ run: side.run, step: side.step, task: side.task, node, sample }),
      );
    trees.push(tree);
    return el(
      "div",
      {},
      el(
        "div",
        { class: "bar" },
        choose(
          "run",
          index.runs.map((_, i) => i),
          side.run,
          index.runs.map((r) => r.name),
          (v) =>
            to(k, {
              run: v,
              step: everyStep(index.runs[v]).includes(side.step)
                ? side.step
                : (likeStep(index.runs[v], side.step).slice(-1)[0] ?? newestStep(index.runs[v])),
            }),
        ),
        choose(
          "step",
          everyStep(run),
          side.step,
          everyStep(run).map(stepName),
          (v) => to(k, { step: v }),
        ),
        choose(
          "task",
          side.made.tasks.map((t) => t.task),
          side.task,
          side.made.tasks.map((t) => `task ${t.task} (no. ${t.number})`),
          (v) => to(k, { task: v }),
        ),
      ),
      tree.box,
    );
  });
  const [a, b] = found,
    same = !!twinOf(a, b.step, [b.row]),
    note = el("span", {});
  const finder = el(
    "button",
    { type: "button", onclick: () => sameTask(a, b, to, note) },
    `Find task no. ${a.row.number} on the right`,
  );
  const facts = COLUMNS.filter(([key]) => !["task", "number"].includes(key)).map(([key, name, about]) =>
    el(
      "tr",
      { title: about },
      el("td", {}, name),
      el("td", { class: "num" }, num(a.row[key])),
      el("td", { class: "num" }, num(b.row[key])),
      el("td", { class: "num" }, a.row[key] === null || b.row[key] === null ? DASH : signed(b.row[key] - a.row[key])),
    ),
  );
  const details = el(
    "details",
    {},
    el("summary", {}, `reward ${num(a.row.reward)} \u2192 ${num(b.row.reward)}`),
    el(
      "div",
      { class: "scroll" },
      el(
        "table",
        { id: "facts" },
        head(["", "left", "right", "difference"].map((t, i) => el("th", { class: i ? "num" : null }, t))),
        el("tbody", {}, facts),
      ),
    ),
  );
  const roots = el(
    "div",
    { class: "halves" },
    found.map((side) => {
      const root = side.made.nodes.find((n) => n.task === side.task);
      return el("pre", { class: "text" }, root ? plain(root.prompt) : "");
    }),
  );
  $("main").replaceChildren(
    el(
      "div",
      { class: "compare" },
      el(
        "div",
        { class: "bar" },
        same
          ? el(
              "span",
              { id: "same" },
              el("b", {}, a.made.heldOut && b.made.heldOut ? "Same held-out task" : "Same task"),
              ` no. ${a.row.number}`,
            )
          : [el("span", { class: "error" }, `Different tasks: no. ${a.row.number} and no. ${b.row.number}`), finder],
        note,
        details,
      ),
      el("div", { class: "bar small" }, roots),
      el("div", { class: "pair" }, panes),
    ),
  );
  trees.forEach((tree) => {
    tree.select(null, null);
    requestAnimationFrame(() => tree.fit(0.45));
  });
}
// Looks for the task of the left side in the other steps of the right side.
async function sameTask(a, b, to, note) {
  const steps = everyStep(index.runs[b.run])
    .filter((s) => a.run !== b.run || s !== a.step)
    .reverse();
  for (const [k, number] of steps.entries()) {
    const step = await load(b.run, number),
      row = twinOf(a, number, step.tasks);
    if (!document.contains(note)) return;
    if (row) return to(1, { step: number, task: row.task });
    note.textContent = ` ${k + 1} of ${steps.length} steps read`;
    if (k % 8 === 7) await pause();
  }
  note.textContent = ` No other recorded step has task no. ${a.row.number}.`;
}
