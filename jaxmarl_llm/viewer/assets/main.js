// The route from the hash to a view, keys, theme, and news of a run that trains.
let turn = 0;
async function route() {
  const mine = ++turn,
    where = place(),
    main = $("main");
  where.run = where.run ?? 0;
  crumbs(where);
  try {
    if (where.view === "search") return await searchView(where);
    if (where.view === "memory" || where.view === "compare") {
      if (!index.runs[where.run]) throw new Error(`There is no run ${where.run}.`);
      return await (where.view === "memory" ? memoryView(where) : compareView(where));
    }
    if (where.step === undefined) return await runsView(where);
    const step = await load(where.run, where.step);
    if (mine !== turn) return;
    if (where.task === undefined && where.node !== undefined && step.node.has(where.node))
      where.task = step.node.get(where.node).task;
    if (where.task === undefined) {
      opened = null;
      stepView(where, step);
    } else {
      if (where.node === undefined && where.sample !== undefined && step.sample.has(where.sample))
        where.node = step.sample.get(where.sample).node;
      taskView(where, step);
    }
  } catch (error) {
    if (mine === turn)
      main.replaceChildren(
        el(
          "div",
          { class: "pad" },
          el("p", { class: "error" }, plain(error.message)),
          el("a", { href: "#" }, "All runs"),
        ),
      );
  } finally {
    if (mine === turn) document.body.dataset.ready = String(turn);
  }
}
function crumbs(where) {
  const run = index.runs[where.run],
    parts = [["Runs", {}]];
  if (where.view === "search") parts.push(["search", null]);
  else if (run && (where.step !== undefined || where.view)) parts.push([run.name, where.view ? {} : {}]);
  if (where.view === "memory" || where.view === "compare") parts.push([where.view, null]);
  if (!where.view && where.step !== undefined) parts.push([stepName(where.step), { run: where.run, step: where.step }]);
  if (!where.view && where.task !== undefined)
    parts.push([`task ${where.task}`, { run: where.run, step: where.step, task: where.task }]);
  if (!where.view && where.node !== undefined)
    parts.push([`node ${where.node}`, { run: where.run, step: where.step, task: where.task, node: where.node }]);
  if (!where.view && where.sample !== undefined) parts.push([`completion ${where.sample}`, null]);
  $("crumbs").replaceChildren(
    ...parts.flatMap(([text, to], i) => [
      i ? el("span", { class: "sep" }, "\u203a") : "",
      i === parts.length - 1 ? el("b", {}, text) : to ? el("a", { href: link(to) }, text) : el("span", {}, text),
    ]),
  );
  document.title =
    parts
      .slice(1)
      .map(([text]) => text)
      .reverse()
      .join(" \u00b7 ") || "Rollouts";
}
function up(where) {
  if (where.sample !== undefined) return { ...where, sample: null };
  if (where.node !== undefined) return { ...where, node: null };
  if (where.task !== undefined && !where.view) return { run: where.run, step: where.step };
  return {};
}
const typing = (target) => /^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName);
document.addEventListener("keydown", (event) => {
  const where = place();
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  if (event.key === "Escape") {
    if (typing(event.target)) event.target.blur();
    else go(up(where));
    return;
  }
  if (typing(event.target)) return;
  if (event.key === "/") {
    event.preventDefault();
    $("query").focus();
  } else if (event.key === "?") $("help").showModal();
  else if (event.key === "[" || event.key === "]") sibling(where, event.key === "]" ? 1 : -1);
  else if (event.key === "ArrowDown" || event.key === "ArrowUp") rows(event);
  else if (
    (event.key === "ArrowLeft" || event.key === "ArrowRight") &&
    where.step !== undefined &&
    where.task === undefined &&
    !where.view
  ) {
    const steps = likeStep(index.runs[where.run ?? 0], where.step),
      next = steps[steps.indexOf(where.step) + (event.key === "ArrowRight" ? 1 : -1)];
    if (next !== undefined) go({ run: where.run ?? 0, step: next });
  } else if (
    event.key === "Enter" &&
    event.target === document.body &&
    where.step === undefined &&
    !where.view &&
    index.runs.length
  )
    go({ run: 0, step: newestStep(index.runs[0]) });
});
async function sibling(where, by) {
  if (where.node === undefined) return;
  const step = await load(where.run ?? 0, where.step),
    list = step.samples(where.node),
    at = list.findIndex((s) => s.step === where.sample),
    next = list[at + by];
  if (next) go({ ...where, sample: next.step });
}
// Up and down move the focus over the rows of a table.
function rows(event) {
  if (event.target.closest && event.target.closest(".treebox")) return;
  const list = [...document.querySelectorAll("tbody tr[tabindex]")],
    next =
      list[list.indexOf(document.activeElement) + (event.key === "ArrowDown" ? 1 : -1)] ||
      (list.includes(document.activeElement) ? null : list[0]);
  if (next) {
    event.preventDefault();
    next.focus();
  }
}
function setTheme(value) {
  dark = value;
  document.documentElement.classList.toggle("dark", dark);
  if (index.runs.length) route();
}
function help() {
  const keys = [
    [
      "\u2190 \u2192 \u2191 \u2193",
      "in a tree: parent, child, the prompts of a turn; in a step: earlier, later; in a table: rows",
    ],
    ["Enter", "open"],
    ["Esc", "one level up; among the runs: all steps again"],
    ["Shift \u2190 \u2192", "on a curve: a range of steps, as by dragging; without Shift: recorded steps"],
    ["[ ]", "sibling before, sibling after"],
    ["+ \u2212 0", "size of a tree, and fit"],
    ["/", "search"],
    ["?", "this window"],
  ];
  const signs = [
    [
      "a card",
      "a prompt of one role. Its column is the turn, its lane the role. A strong border: a prompt of the base line",
    ],
    ["a bar", "a completion: its return around the mean of its group"],
    ["colour", "its advantage: orange below 0, blue above"],
    ["full, hollow", "trained, not trained: the completion's page says why"],
    ["grey with a cross", "no return is known"],
    ["dashed", "played by an opponent, a script or an expert"],
    ["a line between lanes", "a joint action of seats that act at once"],
    ["a square of cells", "every completion of a seat with every one of another: the reward around its mean"],
  ];
  $("help").replaceChildren(
    el("h1", {}, "Keys"),
    el(
      "table",
      {},
      keys.map(([k, t]) => el("tr", {}, el("td", {}, el("kbd", {}, k)), el("td", {}, t))),
    ),
    el("h1", {}, "Signs"),
    el(
      "table",
      {},
      signs.map(([k, t]) => el("tr", {}, el("td", {}, el("b", {}, k)), el("td", {}, t))),
    ),
    el("form", { method: "dialog" }, el("button", {}, "Close")),
  );
}
const notice = (...parts) => {
  $("notice").hidden = !parts.length;
  $("notice").replaceChildren(...parts);
};
async function news() {
  try {
    const before = index,
      fresh = await fetched("index");
    const gone = before.runs.some(
      (run, r) => everyStep(run).some((s) => !everyStep(fresh.runs[r]).includes(s)),
    );
    if (gone) for (const kept of [cached, figures]) kept.clear(); // a resumed run writes steps again
    index = fresh;
    const where = place(),
      added = fresh.runs.flatMap((run, r) =>
        everyStep(run)
          .filter((s) => !everyStep(before.runs[r]).includes(s))
          .map((s) => [r, s]),
      );
    if (where.step === undefined && !where.view) {
      if (JSON.stringify(before) !== JSON.stringify(fresh)) runsView(where);
      notice();
    } else if (added.length) {
      const [r, s] = added[added.length - 1];
      notice("New step: ", el("a", { href: link({ run: r, step: s }) }, `${fresh.runs[r].name}, ${stepName(s)}`));
    }
  } catch (error) {
    notice("The server does not answer. What is open stays here.");
  }
  setTimeout(news, 4000);
}
async function start() {
  $("theme").addEventListener("click", () => setTheme(!dark));
  $("keys").addEventListener("click", () => $("help").showModal());
  $("find").addEventListener("submit", (event) => {
    event.preventDefault();
    go({ view: "search", q: $("query").value });
    $("query").blur();
  });
  help();
  const asked = matchMedia("(prefers-color-scheme: dark)");
  setTheme(asked.matches);
  asked.addEventListener("change", () => setTheme(asked.matches));
  addEventListener("hashchange", () => {
    notice();
    route();
  });
  try {
    index = $("index") ? JSON.parse($("index").textContent) : await fetched("index");
  } catch (error) {
    notice(plain(error.message));
    return;
  }
  await route();
  if (index.live) setTimeout(news, 4000);
}
start();
