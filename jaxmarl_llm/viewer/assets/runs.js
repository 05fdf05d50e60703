// View 1: curves of each run, and its recorded steps; a range restricts the figures, the steps and the tasks.
const lineFigure = (line, chosen) => {
  const values = line.values.filter((_, i) => within(chosen, line.steps[i]));
  if (!values.length) return "no value";
  const last = num(values[values.length - 1]);
  return chosen ? `mean ${num(mean(values))} (${num(values[0])} to ${last})` : last;
};
function rangeBar(chosen) {
  return chosen
    ? el(
        "div",
        { class: "tools", id: "chosen" },
        el("b", {}, `Steps ${chosen[0]} to ${chosen[1]}`),
        el("button", { type: "button", onclick: () => choose(null) }, "All steps (Esc)"),
      )
    : null;
}
function runsView(where) {
  const page = el("div", { class: "pad" }),
    chosen = rangeOf(where),
    focused = document.activeElement && document.activeElement.dataset.panel,
    boxes = [];
  page.append(rangeBar(chosen) || "");
  index.runs.forEach((run, r) => {
    const roles = [
      ...new Set(run.curves.filter((c) => c.title.includes("by role")).flatMap((c) => Object.keys(c.lines))),
    ];
    const all = run.curves.flatMap((c) => Object.values(c.lines).flatMap((l) => l[0])).concat(run.steps);
    const range = [all.reduce((a, b) => Math.min(a, b), all[0]), all.reduce((a, b) => Math.max(a, b), all[0])];
    const newest = newestStep(run),
      steps = run.steps.filter((step) => within(chosen, step));
    const box = el("div");
    boxes.push([box, r, steps]);
    fill(page, {}, [
      el("h1", {}, run.name, index.live ? el("span", { class: "live small" }, "  \u25cf live") : null),
      el("div", { class: "soft small mono" }, run.path),
      el(
        "div",
        { class: "tools" },
        el(
          "a",
          { href: link({ run: r, step: newest }), id: `newest${r}` },
          isEvaluation(newest) ? `Newest: ${stepName(newest)}` : `Newest recorded step: ${newest}`,
        ),
        el("a", { href: link({ run: r, view: "memory" }) }, "Memory timeline"),
        el(
          "a",
          { href: link({ run: r, view: "compare" }), id: `compare${r}` },
          run.held_out.length ? "Compare held-out tasks" : "Compare two steps",
        ),
        el("span", { class: "soft small" }, `${many(run.steps.length, "recorded step")} of ${range[0]} to ${range[1]}`),
      ),
      run.left_out.length
        ? el(
            "p",
            { class: "small leftout" },
            `Left out, because this page has a limit of size: ${many(run.left_out.length, "step")} ` +
              `(${ranges(run.left_out)}).`,
          )
        : null,
      el(
        "div",
        { class: "grid" },
        run.curves.map((c, k) => {
          const lines = Object.entries(c.lines).map(([name, [steps, values]], i) => ({
            name,
            steps,
            values,
            colour: c.title.includes("by role") ? roleColour(roles, name) : roleColour(Object.keys(c.lines), name),
          }));
          return el(
            "div",
            { class: "cell" },
            el("h3", {}, c.title, el("span", { class: "soft small" }, ` \u00b7 ${c.unit}`)),
            curve({
              ...c,
              lines,
              marks: run.steps,
              range,
              chosen,
              panel: `${r}.${k}`,
              pick: (step) => go({ run: r, step }),
            }),
            el(
              "div",
              { class: "legend" },
              lines.map((l) => swatch(l.colour, `${l.name} ${lineFigure(l, chosen)}`)),
            ),
          );
        }),
      ),
      run.curves.length
        ? el(
            "p",
            { class: "soft small" },
            "Blue marks under a curve are recorded steps: click to open the nearest, or drag over a range of steps. " +
              "Strong lines are running means of faint ones. " +
              (chosen
                ? "Numbers are means over the points of the range, with the first and the last value."
                : "Numbers are the last values."),
          )
        : el("p", { class: "soft" }, "There is no metrics.jsonl beside these rollouts, so there are no curves."),
      el("h2", {}, "Recorded steps"),
      stepLinks(steps, r),
      run.held_out.length ? [el("h2", {}, "Held-out tasks, after step"), stepLinks(run.held_out, r)] : null,
      chosen
        ? [el("h2", {}, `Tasks of the ${many(steps.length, "recorded step")} from ${chosen[0]} to ${chosen[1]}`), box]
        : null,
    ]);
  });
  $("main").replaceChildren(page);
  const again = focused && page.querySelector(`[data-panel="${focused}"]`);
  if (again) again.focus({ preventScroll: true });
  return Promise.all(chosen ? boxes.map((box) => rangeTasks(...box)) : []);
}
function stepLinks(steps, r) {
  const box = el("div", { class: "steps" }),
    most = 400;
  const more = (from) => {
    steps
      .slice()
      .reverse()
      .slice(from, from + most)
      .forEach((step) => {
        const text = isEvaluation(step) ? step.slice(5) : String(step);
        box.append(el("a", { href: link({ run: r, step }), "data-to": step }, text));
      });
    if (from + most < steps.length) {
      const button = el(
        "button",
        {
          type: "button",
          onclick: () => {
            button.remove();
            more(from + most);
          },
        },
        `${steps.length - from - most} more`,
      );
      box.append(button);
    }
  };
  more(0);
  return box;
}
function ranges(steps) {
  const shown = steps.length <= 12 ? steps : [...steps.slice(0, 6), "\u2026", ...steps.slice(-5)];
  return shown.join(", ");
}
