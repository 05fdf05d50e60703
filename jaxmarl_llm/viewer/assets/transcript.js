// What a role saw before a completion: entries of its memory, the messages of its prompt, and what was played before.
function memoryOf(step, node, s) {
  const entry = (e, facts) =>
    el(
      "div",
      { class: "entry", "data-event": e.event },
      el("pre", { class: "text memory" }, plain(e.text)),
      el("div", { class: "small soft" }, `slot ${e.slot} \u00b7 ${facts}`),
    );
  const reads = step.reads.get(node.node) || [],
    wrote = step.entries.get(s.step) || [];
  const made = { written: "a new entry", refreshed: "refreshed: an entry of nearly the same prompt has this content now" };
  return [
    reads.length ? el("h3", {}, `Read from the memory of ${node.role}`) : null,
    reads.map((e) =>
      entry(
        e,
        `similarity ${num(e.similarity)} \u00b7 weight ${num(e.weight)} \u00b7 reward when it was written ${num(e.reward)}`,
      ),
    ),
    wrote.length ? el("h3", {}, `Written into the memory of ${node.role} because of this completion`) : null,
    wrote.map((e) => entry(e, `${made[e.event]} \u00b7 weight ${num(e.weight)} \u00b7 reward ${num(e.reward)}`)),
  ];
}
function transcript(where, step, node, played) {
  const told = played.flatMap((m) => m.steps.filter((x) => x >= 0 && !node.unseen.includes(x)));
  return el(
    "section",
    {},
    el(
      "h3",
      {},
      `${node.role} saw`,
      el(
        "span",
        { class: "soft small" },
        ` \u00b7 the prompt, ${many(node.prompt_tokens, "token")}`,
        node.cut_tokens
          ? el("b", { id: "cut" }, `; ${many(node.cut_tokens, "token")} in the middle were cut and not seen`)
          : "",
      ),
    ),
    node.messages.length
      ? el(
          "ol",
          { class: "turns", id: "saw" },
          node.messages.map((m) => messageTurn(step, node, m, told)),
        )
      : el("pre", { class: "text", id: "saw" }, plain(node.prompt)),
    el(
      "h3",
      {},
      "Played before",
      el(
        "span",
        { class: "soft small" },
        node.messages.length
          ? ` \u00b7 ${node.unseen.length} of ${played.flatMap((m) => m.steps).filter((x) => x >= 0).length} not seen by ${node.role}`
          : " \u00b7 the role knows of it only what its prompt shows",
      ),
    ),
    played.length
      ? el(
          "ol",
          { class: "turns", id: "before" },
          played.slice(-200).flatMap((m) => m.steps.filter((x) => x >= 0).map((x) => playedTurn(where, step, node, m, x))),
        )
      : el("p", { class: "soft" }, "Nothing: this is the first turn."),
  );
}
// One message of a prompt. A mark in the colour of a role stands beside its name, and under what it wrote.
function messageTurn(step, node, [speaker, owner, text], told) {
  const known = step.roles.includes(owner);
  return el(
    "li",
    { "data-speaker": owner || speaker },
    el(
      "span",
      { class: "who", style: known ? `border-color:${roleColour(step.roles, owner)}` : null },
      owner || speaker,
      owner ? el("small", {}, speaker) : null,
    ),
    el("pre", { class: "text" }, known ? plain(text) : quotations(step, text, told)),
  );
}
// A text in parts: those that quote a completion, between ends of words, are named and underlined by role.
function quotations(step, text, told) {
  const found = [];
  for (const x of new Set(told)) {
    const said = step.sample.get(x).text.trim();
    if (!said) continue;
    // The last place first: a prompt tells what was said behind the task.
    for (let at = text.lastIndexOf(said); at >= 0; at = at ? text.lastIndexOf(said, at - 1) : -1) {
      const end = at + said.length;
      if (ENDS.test(text.slice(0, at)) || STARTS.test(text.slice(end))) continue;
      if (found.some((f) => at < f.end && f.at < end)) continue;
      found.push({ at, end, x });
      break;
    }
  }
  found.sort((a, b) => a.at - b.at);
  const parts = [];
  let from = 0;
  for (const { at, end, x } of found) {
    const role = step.node.get(step.sample.get(x).node).role;
    parts.push(
      plain(text.slice(from, at)),
      el(
        "b",
        { style: `border-color:${roleColour(step.roles, role)}`, title: `${role} wrote this: completion ${x}` },
        plain(text.slice(at, end)),
      ),
    );
    from = end;
  }
  return [...parts, plain(text.slice(from))];
}
const ENDS = /[\p{L}\p{N}_]$/u,
  STARTS = /^[\p{L}\p{N}_]/u;
function playedTurn(where, step, node, move, x) {
  const one = step.sample.get(x),
    n = step.node.get(one.node),
    hidden = node.unseen.includes(x);
  return el(
    "li",
    { class: hidden ? "notseen" : null, "data-sample": x },
    el(
      "a",
      {
        class: "who",
        style: `border-color:${roleColour(step.roles, n.role)}`,
        href: link({ ...where, node: n.node, sample: x }),
      },
      `${move.turn} \u00b7 ${n.role}`,
      hidden ? el("small", {}, `not seen by ${node.role}`) : null,
    ),
    el("pre", { class: "text" }, plain(one.text)),
    el("span", { class: "small num soft" }, signed(one.advantage, 2)),
  );
}
