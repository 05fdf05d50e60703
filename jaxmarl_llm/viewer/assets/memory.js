// View 6: what each role's memory read, wrote, refreshed and removed, over the recorded steps.
async function memoryView(where) {
  const run = index.runs[where.run],
    mostSteps = 200,
    steps = run.steps.slice(-mostSteps),
    page = el("div", { class: "pad" });
  page.append(el("h1", {}, `Memory of ${run.name}`), el("p", { class: "soft", id: "progress" }, "reading\u2026"));
  $("main").replaceChildren(page);
  const events = [],
    roles = [];
  for (const [k, number] of steps.entries()) {
    const step = await load(where.run, number);
    if (!document.contains(page)) return;
    for (const role of step.roles) if (!roles.includes(role)) roles.push(role);
    for (const e of step.memory) {
      const paid = e.event === "read" ? mean(step.samples(e.node).map((s) => s.returns)) : e.reward,
        n = step.node.get(e.node);
      events.push({ ...e, at: number, paid, task: n ? n.task : null });
    }
    $("progress").textContent = `${k + 1} of ${steps.length} steps read`;
    if (k % 8 === 7) await pause();
  }
  $("progress").textContent =
    `${many(events.length, "event")} in ${many(steps.length, "recorded step")}` +
    `${run.steps.length > mostSteps ? `, the newest ${mostSteps}` : ""}. ` +
    `Steps between them are not recorded, so entries may change unseen.`;
  const own = roles.filter((role) => events.some((e) => e.role === role));
  if (!own.length) return page.append(el("p", {}, "No role read or wrote a memory in the recorded steps."));
  const rewards = events.map((e) => e.paid).filter((v) => v !== null),
    low = rewards.length ? Math.min(...chunked(rewards.map((v) => -v)).map((v) => -v), ...rewards.slice(0, 1)) : 0;
  const span = [rewards.reduce((a, b) => Math.min(a, b), low), rewards.reduce((a, b) => Math.max(a, b), low)];
  page.append(
    el(
      "div",
      { class: "legend" },
      el("span", {}, "\u25a0 written"),
      el("span", {}, "\u25c6 refreshed"),
      el("span", {}, "\u25cf read"),
      el("span", {}, "\u2715 removed"),
      "colour: reward, ",
      swatch(shade(span[0], span), num(span[0])),
      swatch(shade(span[1], span), num(span[1])),
      "of a read: mean return of the prompt that read it",
    ),
  );
  const chosen = where.role && own.includes(where.role) ? where.role : own[0];
  page.append(
    el(
      "div",
      { class: "tools" },
      own.map((role) =>
        el(
          "button",
          {
            type: "button",
            "aria-pressed": String(role === chosen),
            onclick: () => go({ run: where.run, view: "memory", role }),
          },
          role,
          el("span", { class: "soft small" }, ` ${events.filter((e) => e.role === role).length}`),
        ),
      ),
    ),
  );
  page.append(
    memoryChart(
      where,
      events.filter((e) => e.role === chosen),
      steps,
      span,
    ),
  );
  page.append(
    memoryTable(
      where,
      events.filter((e) => e.role === chosen),
    ),
  );
}
// One hue, from pale to strong.
const shade = (v, [low, high]) =>
  v === null
    ? palette().none
    : mixed(
        dark ? [60, 78, 76] : [206, 230, 222],
        dark ? [90, 222, 176] : [0, 104, 74],
        high > low ? (v - low) / (high - low) : 0.6,
      );
function memoryChart(where, events, steps, span) {
  const slots = [...new Set(events.map((e) => e.slot))].sort((a, b) => a - b),
    p = palette(),
    wide = clamp(Math.floor(1000 / steps.length), 6, 44),
    high = slots.length > 40 ? 11 : 16,
    left = 56,
    W = left + steps.length * wide + 10,
    H = 26 + slots.length * high;
  const svg = sv("svg", {
      width: W,
      height: H,
      role: "img",
      "aria-label": `${many(events.length, "event")} in ${many(slots.length, "slot")}`,
    }),
    row = new Map(slots.map((s, i) => [s, i])),
    column = new Map(steps.map((s, i) => [s, i]));
  slots.forEach((s, i) =>
    svg.append(
      sv("rect", {
        x: left,
        y: 20 + i * high,
        width: steps.length * wide,
        height: high,
        fill: i % 2 ? p.panel : p.band,
      }),
      high > 12 || i % 4 === 0
        ? T(left - 6, 20 + i * high + high - 3, `slot ${s}`, 10, p.soft, { "text-anchor": "end" })
        : "",
    ),
  );
  const every = Math.ceil(46 / wide);
  steps.forEach((s, i) => {
    if (i % every === 0) svg.append(T(left + i * wide, 12, String(s), 10, p.soft));
  });
  const count = new Map();
  for (const e of events) {
    const key = `${e.at}.${e.slot}`,
      k = count.get(key) || 0;
    count.set(key, k + 1);
    if (k > 2) continue; // the table has them all
    const x = left + column.get(e.at) * wide + 5 + k * Math.min(11, wide / 3),
      y = 20 + row.get(e.slot) * high + high / 2,
      colour = shade(e.paid, span),
      r = high > 12 ? 5 : 4;
    const mark =
      e.event === "written"
        ? sv("rect", {
            x: x - r,
            y: y - r,
            width: 2 * r,
            height: 2 * r,
            fill: colour,
            stroke: p.soft,
            "stroke-width": 0.6,
          })
        : e.event === "refreshed"
          ? sv("path", {
              d: `M${x} ${y - r - 1}l${r + 1} ${r + 1}l${-r - 1} ${r + 1}l${-r - 1} ${-r - 1}z`,
              fill: colour,
              stroke: p.soft,
              "stroke-width": 0.6,
            })
          : e.event === "read"
            ? sv("circle", { cx: x, cy: y, r, fill: colour, stroke: p.soft, "stroke-width": 0.6 })
            : sv("path", {
                d: `M${x - r} ${y - r}l${2 * r} ${2 * r}m0 ${-2 * r}l${-2 * r} ${2 * r}`,
                stroke: p.ink,
                "stroke-width": 1.6,
              });
    svg.append(
      sv(
        "g",
        {},
        mark,
        sv("title", {}, `step ${e.at}, slot ${e.slot}, ${e.event}: ${cut(e.text, 80)}, reward ${num(e.paid)}`),
      ),
    );
  }
  return el(
    "div",
    { class: "scroll cell" },
    el("div", { style: `width:${W}px` }, fill(svg, { style: `width:${W}px;height:${H}px` }, [])),
  );
}
function memoryTable(where, events) {
  const body = el("tbody"),
    most = 200,
    list = events.slice().reverse();
  const more = (from) => {
    for (const e of list.slice(from, from + most))
      body.append(
        el(
          "tr",
          {},
          el(
            "td",
            { class: "num" },
            el(
              "a",
              {
                href: link(
                  e.task === null
                    ? { run: where.run, step: e.at }
                    : { run: where.run, step: e.at, task: e.task, node: e.node },
                ),
              },
              e.at,
            ),
          ),
          el("td", {}, e.event),
          el("td", { class: "num" }, e.slot),
          el("td", { class: "mono small" }, cut(e.text, 120)),
          el("td", { class: "num" }, num(e.paid)),
          el("td", { class: "num" }, num(e.weight)),
          el("td", { class: "num" }, num(e.similarity)),
        ),
      );
    if (from + most < list.length) {
      body.append(moreRow(7, `${list.length - from - most} more`, () => more(from + most)));
    }
  };
  more(0);
  return el(
    "div",
    { class: "scroll" },
    el("h2", {}, "Events, the newest first"),
    el(
      "table",
      { id: "events" },
      head(["step", "event", "slot", "text", "reward", "weight", "similarity"].map((t, i) =>
            el("th", { class: i === 1 || i === 3 ? null : "num" }, t),
          )),
      body,
    ),
  );
}
