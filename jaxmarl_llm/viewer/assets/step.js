// View 2: the tasks of a step as a table, and the variance of its groups by role and turn.
let order = ["task", 1];

function stepView(where, step) {
  const h = step.header,
    page = el("div", { class: "pad" });
  const weights = Object.entries(h.weights)
    .map(([name, w]) => `${num(w)} \u00b7 ${name}`)
    .join(" + ");
  page.append(
    el(
      "h1",
      {},
      step.heldOut ? `Evaluation after step ${h.step}` : `Step ${h.step}`,
      el("span", { class: "soft" }, ` \u00b7 RL step ${h.rl_step}`),
    ),
    el(
      "div",
      { class: "soft" },
      `${h.recipe} on ${h.environment} \u00b7 plan ${h.plan} \u00b7 seed ${h.seed} \u00b7 ${h.tasks} of ` +
        `${h.batch}${step.heldOut ? " held-out" : ""} tasks are recorded` +
        `${h.commit ? ` \u00b7 commit ${h.commit.slice(0, 10)}` : ""}`,
    ),
    el(
      "div",
      { class: "soft" },
      `reward = ${weights || "nothing is paid"} \u00b7 updated: ${h.updated.join(", ") || "no model"}`,
    ),
    stepTools(where),
  );
  const sort = (key) => {
    order = turned(order, key);
    stepView(where, step);
    $("main").querySelector(`th button[data-key="${key}"]`).focus();
  };
  const open = (row) => go({ run: where.run, step: where.step, task: row.task });
  page.append(taskTable({ id: "tasks", rows: step.tasks, columns: COLUMNS, order, sort, open, foot: null }));
  if (!step.heldOut)
    page.append(
      el("h2", {}, "Variance of groups, by role and turn"),
      variances(where, step),
      el(
        "p",
        { class: "soft small" },
        "A dot is a group: full if it was selected, hollow if not. The dash is the mean. A group at 0 has " +
          "returns that are all equal, and teaches nothing. Click a dot to open it.",
      ),
    );
  if (step.failures.length)
    page.append(
      el("h2", {}, many(step.failures.length, "failure")),
      el(
        "ul",
        {},
        step.failures
          .slice(0, 200)
          .map((f) =>
            el(
              "li",
              { class: "small" },
              `task no. ${f.number}, turn ${f.turn}, ${f.call}${f.roles.length ? " of " + f.roles.join(", ") : ""}: `,
              el("code", {}, plain(f.message)),
            ),
          ),
      ),
    );
  $("main").replaceChildren(page);
}

function stepTools(where) {
  const steps = likeStep(index.runs[where.run], where.step),
    at = steps.indexOf(where.step);
  const to = (i, text) =>
    el(
      "button",
      {
        type: "button",
        disabled: i < 0 || i >= steps.length,
        onclick: () => go({ ...where, step: steps[i], node: null, sample: null }),
      },
      text,
    );
  return el(
    "div",
    { class: "tools" },
    to(0, "\u21e4 first"),
    to(at - 1, "\u2190 earlier"),
    to(at + 1, "later \u2192"),
    to(steps.length - 1, "newest \u21e5"),
    el("a", { href: link({ run: where.run, view: "memory" }) }, "Memory timeline"),
    el(
      "a",
      {
        href: link({
          view: "compare",
          run: where.run,
          step: steps[0],
          task: where.task || 0,
          run2: where.run,
          step2: where.step,
        }),
      },
      `Compare with the first ${isEvaluation(where.step) ? "evaluation" : "step"}`,
    ),
  );
}

// One small chart a role: x is the turn, y the variance. Every chart has the same scale of y.
function variances(where, step) {
  const known = step.groups.filter((g) => g.variance !== null && g.size > 1),
    p = palette();
  const firstNode = new Map();
  for (const s of step.steps) if (s.group >= 0 && !firstNode.has(s.group)) firstNode.set(s.group, s);
  const top = Math.max(1e-9, ...chunked(known.map((g) => g.variance)));
  const W = 300,
    H = 130,
    left = 40,
    bottom = 22,
    dots = 60;
  return el(
    "div",
    { class: "grid" },
    step.roles
      .filter((role) => known.some((g) => g.role === role))
      .map((role) => {
        const own = known.filter((g) => g.role === role),
          turns = [...new Set(own.map((g) => g.turn))].sort((a, b) => a - b),
          colour = roleColour(step.roles, role);
        const X = (turn) => left + ((turns.indexOf(turn) + 0.5) * (W - left - 6)) / turns.length,
          Y = (v) => H - bottom - (v / top) * (H - bottom - 10);
        const svg = sv("svg", {
          viewBox: `0 0 ${W} ${H}`,
          role: "img",
          "aria-label": `${role}: variance of ${own.length} groups`,
        });
        for (const v of ticks(0, top, 3))
          svg.append(
            sv("line", { x1: left, x2: W, y1: Y(v), y2: Y(v), stroke: p.line }),
            sv("text", { x: left - 5, y: Y(v) + 4, "text-anchor": "end", "font-size": 10, fill: p.soft }, num(v, 2)),
          );
        let hidden = 0;
        for (const turn of turns) {
          const here = own.filter((g) => g.turn === turn),
            every = Math.ceil(here.length / dots),
            wide = Math.min(60, ((W - left) / turns.length) * 0.7);
          if (turns.length <= 20 || turns.indexOf(turn) % Math.ceil(turns.length / 20) === 0)
            svg.append(
              sv(
                "text",
                { x: X(turn), y: H - 6, "text-anchor": "middle", "font-size": 10, fill: p.soft },
                turns.length > 8 ? String(turn) : `turn ${turn}`,
              ),
            );
          const middle = mean(here.map((g) => g.variance));
          svg.append(
            sv("line", {
              x1: X(turn) - wide / 2,
              x2: X(turn) + wide / 2,
              y1: Y(middle),
              y2: Y(middle),
              stroke: p.ink,
              "stroke-width": 1.5,
            }),
          );
          here
            .filter((_, i) => i % every === 0)
            .forEach((g, i, list) => {
              const s = firstNode.get(g.group),
                n = s && step.node.get(s.node);
              const dot = sv(
                "circle",
                {
                  cx: X(turn) + (list.length > 1 ? (i / (list.length - 1) - 0.5) * wide : 0),
                  cy: Y(g.variance),
                  r: 4,
                  fill: g.selected ? colour : "none",
                  stroke: colour,
                  "stroke-width": 1.5,
                },
                sv(
                  "title",
                  {},
                  `group ${g.group}: variance ${num(g.variance)}, ${g.selected ? "selected" : "not selected"}`,
                ),
              );
              if (n) {
                dot.style.cursor = "pointer";
                dot.addEventListener("click", () =>
                  go({ run: where.run, step: where.step, task: n.task, node: n.node }),
                );
              }
              svg.append(dot);
            });
          hidden += here.length - Math.ceil(here.length / every);
        }
        const equal = own.filter((g) => g.low === g.high).length;
        return el(
          "div",
          { class: "cell" },
          el(
            "h3",
            { style: `color:${colour}` },
            role,
            el(
              "span",
              { class: "soft small" },
              ` \u00b7 ${many(own.length, "group")}, ${equal} all equal${hidden ? `, ${hidden} not drawn` : ""}`,
            ),
          ),
          svg,
        );
      }),
  );
}
