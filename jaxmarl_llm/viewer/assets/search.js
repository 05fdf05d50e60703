// View 7: search in prompts, completions, memories and failures of all recorded steps, the newest first.
async function searchView(where) {
  const query = where.q || "",
    wanted = query.toLowerCase(),
    most = 500,
    page = el("div", { class: "pad" }),
    body = el("tbody"),
    note = el("p", { class: "soft", id: "found" }, "searching\u2026");
  page.append(
    el("h1", {}, `Search: \u201c${plain(query)}\u201d`),
    note,
    el(
      "div",
      { class: "scroll" },
      el(
        "table",
        {},
        head(["run", "step", "task", "where", "text"].map((t) => el("th", {}, t))),
        body,
      ),
    ),
  );
  $("main").replaceChildren(page);
  if (!query) {
    note.textContent = "Type a text above.";
    return;
  }
  let count = 0,
    read = 0;
  const add = (r, step, task, kind, text, to) => {
    const at = text.toLowerCase().indexOf(wanted);
    if (at < 0 || count++ >= most) return;
    const hit = plain(text.slice(at, at + query.length));
    body.append(
      el(
        "tr",
        {},
        el("td", {}, index.runs[r].name),
        el("td", { class: "num" }, step),
        el("td", { class: "num" }, task ?? DASH),
        el("td", {}, el("a", { href: link(to) }, kind)),
        el(
          "td",
          { class: "mono small" },
          cut(text.slice(Math.max(0, at - 50), at), 50, true),
          el("mark", {}, hit),
          cut(text.slice(at + query.length, at + query.length + 70), 70),
        ),
      ),
    );
  };
  for (const [r, run] of index.runs.entries())
    for (const number of everyStep(run).reverse()) {
      const step = await load(r, number);
      if (!document.contains(page)) return;
      const to = { run: r, step: number };
      for (const n of step.nodes) {
        add(r, number, n.task, `prompt of ${n.role}`, n.prompt, { ...to, task: n.task, node: n.node });
        for (const s of step.samples(n.node))
          add(r, number, n.task, `${n.role} wrote`, s.text, { ...to, task: n.task, node: n.node, sample: s.step });
      }
      for (const e of step.memory)
        if (e.event !== "read")
          add(r, number, null, `memory of ${e.role}`, e.text, { run: r, view: "memory", role: e.role });
      for (const f of step.failures) add(r, number, null, "failure", f.message, to);
      note.textContent =
        `${many(count, "place")} in ${many(++read, "step")}` + `${count > most ? `; the first ${most} are shown` : ""}`;
      if (count > most) return;
      await pause();
    }
}
