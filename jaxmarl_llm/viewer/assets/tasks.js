// The table of tasks: of one step, or of all recorded steps of a range.
const COLUMNS = [
  ["task", "task", "Position in the batch"],
  ["number", "no.", "Number among the training tasks, or among the held-out tasks"],
  ["reward", "reward", "Weighted, undiscounted reward of an episode: mean over roles and continuations"],
  ["variance", "group variance", "Mean variance of the returns in a group"],
  ["invalid", "invalid", "Joint actions without a reward, and failures"],
  ["advantage", "|advantage|", "Mean of the absolute advantage"],
  ["equal", "all equal", "Groups whose returns are all equal, of the groups of two or more"],
  ["trained", "trained", "Completions in the update, of all"],
  ["cut", "cut", "Completions that the length limit ended"],
  ["longest", "longest", "Tokens of the longest completion"],
  ["nodes", "prompts", "Nodes of the tree"],
];
const figure = (row, key) =>
  key === "equal"
    ? `${row.equal} of ${row.groups}`
    : key === "trained"
      ? `${row.trained} of ${row.completions}`
      : num(row[key]);
// The order after a click on a column: the other way round, or from the largest on; names go up.
const turned = (order, key) => [key, order[0] === key ? -order[1] : ["step", "task", "number"].includes(key) ? 1 : -1];

// id: of the table. rows: figures of tasks. order: [key, 1 or -1]. sort(key): a click on a column. open(row).
// foot: a last row of the same keys, as text; null: none.
function taskTable({ id, rows, columns, order, sort, open, foot }) {
  const sorted = rows.slice().sort((a, b) => {
    const [x, y] = [a[order[0]], b[order[0]]];
    const tie = (a.step || 0) - (b.step || 0) || a.task - b.task;
    return x === y ? tie : x === null ? 1 : y === null ? -1 : (x - y) * order[1];
  });
  const body = el("tbody"),
    most = 300;
  const more = (from) => {
    for (const row of sorted.slice(from, from + most))
      body.append(
        el(
          "tr",
          {
            class: "link",
            tabindex: 0,
            "data-task": row.task,
            "data-of": row.step,
            onclick: () => open(row),
            onkeydown: (e) => {
              if (e.key === "Enter") open(row);
            },
          },
          columns.map(([key]) => el("td", { class: "num" }, figure(row, key))),
        ),
      );
    if (from + most < sorted.length)
      body.append(moreRow(columns.length, `${sorted.length - from - most} more tasks`, () => more(from + most)));
  };
  more(0);
  const column = ([key, name, about]) =>
    el(
      "th",
      {
        class: "num",
        title: about,
        "aria-sort": order[0] === key ? (order[1] > 0 ? "ascending" : "descending") : null,
      },
      el(
        "button",
        { type: "button", "data-key": key, onclick: () => sort(key) },
        name + (order[0] === key ? (order[1] > 0 ? " \u2191" : " \u2193") : ""),
      ),
    );
  return el(
    "div",
    { class: "scroll" },
    el(
      "table",
      { id },
      head(columns.map(column)),
      body,
      foot
        ? el(
            "tfoot",
            {},
            el(
              "tr",
              {},
              columns.map(([key]) => el("td", { class: "num" }, foot[key])),
            ),
          )
        : null,
    ),
  );
}

// ------------------------------------------------------------------------------------------------- a range of steps
const figures = new Map(); // "run.step" -> figures of its tasks
let rangeOrder = ["step", 1];
async function taskFigures(run, step) {
  const key = `${run}.${step}`;
  if (!figures.has(key)) figures.set(key, (await load(run, step)).tasks);
  return figures.get(key).map((row) => ({ ...row, step }));
}
// Sums of counts, and means over tasks of the others; the longest completion of all.
function totals(rows) {
  const sum = (key) => rows.reduce((a, row) => a + row[key], 0);
  const out = { step: "all", task: many(rows.length, "task"), number: "" };
  for (const key of ["reward", "variance", "advantage"]) out[key] = `mean ${num(mean(rows.map((row) => row[key])))}`;
  for (const key of ["invalid", "cut", "nodes"]) out[key] = num(sum(key));
  out.equal = `${sum("equal")} of ${sum("groups")}`;
  out.trained = `${sum("trained")} of ${sum("completions")}`;
  out.longest = num(Math.max(...chunked(rows.map((row) => row.longest))));
  return out;
}
// Reads the steps and fills the box with the table of their tasks.
async function rangeTasks(box, r, steps) {
  const mostSteps = 200,
    read = steps.slice(-mostSteps),
    note = el("p", { class: "soft small" }),
    rows = [];
  box.replaceChildren(note);
  try {
    for (const [k, step] of read.entries()) {
      note.textContent = `${k} of ${read.length} steps read`;
      rows.push(...(await taskFigures(r, step)));
      if (!document.contains(box)) return;
    }
  } catch (error) {
    return box.replaceChildren(el("p", { class: "error" }, plain(error.message)));
  }
  if (!rows.length) return box.replaceChildren(el("p", { class: "soft" }, "No step of this range is recorded."));
  const draw = () => {
    const sort = (key) => {
      rangeOrder = turned(rangeOrder, key);
      draw();
      box.querySelector(`th button[data-key="${key}"]`).focus();
    };
    box.replaceChildren(
      taskTable({
        id: `tasks${r}`,
        rows,
        columns: [["step", "step", "Step of the run"], ...COLUMNS],
        order: rangeOrder,
        sort,
        open: (row) => go({ run: r, step: row.step, task: row.task }),
        foot: totals(rows),
      }),
      read.length < steps.length ? el("p", { class: "soft small" }, `The newest ${mostSteps} steps of the range.`) : "",
    );
  };
  draw();
}
