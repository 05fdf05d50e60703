// View 5: two tasks side by side: of two steps, or of two runs.
async function compareView(where) {
  const other = { run: where.run2 ?? where.run, step: where.step2, task: where.task2 ?? where.task ?? 0 };
  const last = (r) => index.runs[r] && index.runs[r].steps;
  const one = { run: where.run, step: where.step ?? (last(where.run) || [])[0], task: where.task ?? 0 };
  if (other.step === undefined) other.step = (last(other.run) || []).slice(-1)[0];
  const sides = [one, other],
    found = await Promise.all(
      sides.map(async (side) => {
        if (!index.runs[side.run]) throw new Error(`There is no run ${side.run}.`);
        const step = await load(side.run, side.step),
          row = step.tasks.find((t) => t.task === side.task) || step.tasks[0];
        if (!row) throw new Error(`Step ${side.step} has no task.`);
        return { ...side, task: row.task, made: step, row };
      }),
    );
  if (where.task2 === undefined) {
    // the same task, where the right step has it
    const equal = found[1].made.tasks.find((t) => t.number === found[0].row.number);
    if (equal) Object.assign(found[1], { task: equal.task, row: equal });
  }
  const to = (k, change) => {
    const s = found.map((f) => ({ run: f.run, step: f.step, task: f.task }));
    Object.assign(s[k], change);
    go({ view: "compare", ...s[0], run2: s[1].run, step2: s[1].step, task2: s[1].task });
  };
  const choose = (label, values, now, names, pick) =>
    el(
      "select",
      { "aria-label": label, onchange: (e) => pick(+e.target.value) },
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
              step: index.runs[v].steps.includes(side.step) ? side.step : index.runs[v].steps.slice(-1)[0],
            }),
        ),
        choose(
          "step",
          run.steps,
          side.step,
          run.steps.map((s) => `step ${s}`),
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
    same = a.row.number === b.row.number,
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
          ? el("span", {}, el("b", {}, "Same task"), ` no. ${a.row.number}`)
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
  const steps = index.runs[b.run].steps
    .filter((s) => a.run !== b.run || s !== a.step)
    .slice()
    .reverse();
  for (const [k, number] of steps.entries()) {
    const step = await load(b.run, number),
      row = step.tasks.find((t) => t.number === a.row.number);
    if (!document.contains(note)) return;
    if (row) return to(1, { step: number, task: row.task });
    note.textContent = ` ${k + 1} of ${steps.length} steps read`;
    if (k % 8 === 7) await pause();
  }
  note.textContent = ` No other recorded step has task no. ${a.row.number}.`;
}
