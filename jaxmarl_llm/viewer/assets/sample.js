// View 4: one completion: what its role wrote, its tokens, and the arithmetic of its advantage.
function arithmetic(step, s) {
  const group = step.group.get(s.group),
    d = step.deviation(s);
  if (d === null) return el("div", { class: "sum" }, "No return is known, so there is no advantage.");
  if (step.heldOut)
    return el("div", { class: "sum", id: "sum" }, `return ${num(s.returns, 4)}  `, whyChip(s), ` ${WHY[s.why]}`);
  const close = (a, b) => Math.abs(a - b) <= 1e-4 * Math.max(1e-2, Math.abs(a), Math.abs(b)),
    std = Math.sqrt(Math.max(0, group.variance || 0));
  let after;
  if (s.advantage === null) after = "No advantage is recorded.";
  else if (close(d, s.advantage)) after = "The advantage is this difference.";
  else if (std > 0 && close(d / std, s.advantage))
    after = `Then divided by the standard deviation of the group, ${num(std)}.`;
  else if (d !== 0)
    after =
      `The credit rule of the recipe made it ${signed(s.advantage)}: ${num(s.advantage / d)} times ` +
      `the difference.`;
  else after = `The credit rule of the recipe made it ${signed(s.advantage)}.`;
  return el(
    "div",
    { class: "sum", id: "sum" },
    el("div", {}, `return ${num(s.returns, 4)} \u2212 group mean ${num(group.mean, 4)} = `, el("b", {}, signed(d, 4))),
    el("div", {}, after),
    el(
      "div",
      {},
      "advantage ",
      el(
        "b",
        { style: `color:${s.advantage > 0 ? "var(--good)" : s.advantage < 0 ? "var(--bad)" : "inherit"}` },
        signed(s.advantage, 4),
      ),
      "  ",
      whyChip(s),
      ` ${WHY[s.why] || ""}`,
    ),
  );
}
function rewardTable(where, step, s, role) {
  const moves = step.movesWith.get(s.step) || [],
    i = step.roles.indexOf(role),
    weights = step.header.weights;
  if (!moves.length) return el("p", { class: "soft" }, "It is in no joint action that was played.");
  const rows = step.header.components.map((name) => {
    const values = moves.map((m) => (m.valid ? m.rewards[name][i] : null)),
      value = values.includes(null) ? mean(values) : mean(values),
      weight = name in weights ? weights[name] : null;
    return el(
      "tr",
      {},
      el("td", {}, name),
      el("td", { class: "num" }, num(value)),
      el("td", { class: "num" }, name in weights ? `\u00d7 ${num(weight)}` : "not paid"),
      el("td", { class: "num" }, value === null || weight === null ? DASH : num(value * weight)),
    );
  });
  const total = mean(moves.map((m) => step.reward(m, role))),
    lost = moves.filter((m) => !m.valid).length;
  const rest = s.returns !== null && total !== null ? s.returns - total : null;
  return el(
    "div",
    {},
    el(
      "table",
      {},
      head(["component", "value", "weight", "paid"].map((t, k) => el("th", { class: k ? "num" : null }, t))),
      el(
        "tbody",
        {},
        rows,
        el(
          "tr",
          {},
          el(
            "td",
            { colspan: 3 },
            el(
              "b",
              {},
              moves.length > 1 ? `reward of this turn, mean of ${moves.length} joint actions` : "reward of this turn",
            ),
          ),
          el("td", { class: "num" }, el("b", {}, num(total))),
        ),
        rest === null || Math.abs(rest) < 1e-6
          ? null
          : el(
              "tr",
              {},
              el("td", { colspan: 3 }, "later turns, and what the credit rule adds"),
              el("td", { class: "num" }, signed(rest)),
            ),
        el(
          "tr",
          {},
          el("td", { colspan: 3 }, el("b", {}, "return")),
          el("td", { class: "num" }, el("b", {}, num(s.returns))),
        ),
      ),
    ),
    lost
      ? el("p", { class: "small error" }, `${many(lost, "joint action")} without a valid reward: unknown, not 0.`)
      : null,
    moves.some((m) => step.actors(m).length > 1)
      ? el(
          "div",
          { class: "small soft" },
          "Played with: ",
          moves.slice(0, 24).map((m, k) => [
            k ? "; " : "",
            m.steps
              .filter((x) => x >= 0 && x !== s.step)
              .map((x) => {
                const n = step.node.get(step.sample.get(x).node);
                return el(
                  "a",
                  { href: link({ ...where, node: n.node, sample: x }) },
                  `${n.role} #${x} \u201c${cut(step.sample.get(x).text, 14)}\u201d`,
                );
              }),
            ` (${num(step.reward(m, role))})`,
          ]),
          moves.length > 24 ? ` and ${moves.length - 24} more` : "",
        )
      : null,
  );
}
function samplePanel(where, step, node, s) {
  const at = step.samples(node.node),
    i = at.indexOf(s),
    beside = (k, text) =>
      el(
        "button",
        { type: "button", disabled: !at[i + k], onclick: () => go({ ...where, sample: at[i + k].step }) },
        text,
      );
  const played = step.before(node);
  const note = el("span", { class: "small soft" });
  return el(
    "section",
    {},
    el(
      "h2",
      {},
      `Completion ${s.step}`,
      el("span", { class: "soft small" }, ` \u00b7 ${s.source}, parameters after step ${s.version}`),
    ),
    el(
      "div",
      { class: "tools" },
      beside(-1, "\u2190 sibling [ "),
      beside(1, "sibling ] \u2192"),
      el(
        "button",
        {
          type: "button",
          onclick: () =>
            copy(
              JSON.stringify(
                {
                  header: step.header,
                  node,
                  completion: s,
                  group: step.group.get(s.group) || null,
                  transitions: step.movesWith.get(s.step) || [],
                  memory: [...(step.reads.get(node.node) || []), ...(step.entries.get(s.step) || [])],
                },
                null,
                1,
              ),
              note,
            ),
        },
        "Copy as JSON",
      ),
      note,
    ),
    arithmetic(step, s),
    el("h3", {}, "Reward"),
    rewardTable(where, step, s, node.role),
    el("h3", {}, `${node.role} wrote`),
    el("pre", { class: "text own", id: "wrote" }, plain(s.text) || "(no text)"),
    tokenStrip(where, s),
    memoryOf(step, node, s),
    transcript(where, step, node, played),
  );
}
async function copy(text, note) {
  try {
    await navigator.clipboard.writeText(text);
    note.textContent = "copied";
  } catch {
    const area = el("textarea", { style: "position:fixed;opacity:0" });
    area.value = text;
    document.body.append(area);
    area.select();
    note.textContent = document.execCommand("copy") ? "copied" : "the browser refused";
    area.remove();
  }
}
function download(name, text, kind) {
  const address = URL.createObjectURL(new Blob([text], { type: kind })),
    a = el("a", { href: address, download: name });
  document.body.append(a);
  a.click();
  a.remove();
  setTimeout(() => URL.revokeObjectURL(address), 5000);
}
