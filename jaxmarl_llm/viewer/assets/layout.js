// Where each prompt of a task stands: a column for each turn, a lane for each role. Pure numbers, nothing is drawn.
const CARD = { w: 176, h: 96, low: 52, gap: 74, row: 10, left: 104, head: 30, bars: 28 };

function layout(step, task) {
  const nodes = (step.nodesOf.get(task) || []).slice().sort((a, b) => a.turn - b.turn || a.node - b.node);
  const moves = step.movesOf.get(task) || [];
  const turns = [...new Set(nodes.map((n) => n.turn))].sort((a, b) => a - b),
    column = new Map(turns.map((t, i) => [t, i]));
  const items = [],
    of = new Map(),
    byTurn = new Map(turns.map((t) => [t, []]));
  for (const n of nodes) {
    const item = {
      node: n,
      samples: step.samples(n.node),
      group: step.groupOf(n.node),
      x: CARD.left + column.get(n.turn) * (CARD.w + CARD.gap),
      y: 0,
      children: [],
      rank: 0,
      main: false,
    };
    item.h = item.samples.length > 1 ? CARD.h : CARD.low;
    items.push(item);
    of.set(n.node, item);
    byTurn.get(n.turn).push(item);
  }
  const seat = (move) => {
    const s = move.steps.find((x) => x >= 0);
    return s === undefined ? undefined : of.get(step.sample.get(s).node);
  };
  for (const item of items) {
    const move = step.move.get(item.node.parent);
    item.move = move;
    item.parent = move && seat(move);
    if (item.parent) item.parent.children.push(item);
  }
  // In a column, children stand in the order of their parents, and of the completions that led to them.
  let most = 1;
  const cells = new Map();
  for (const turn of turns) {
    const list = byTurn.get(turn);
    list.sort(
      (a, b) =>
        (a.parent ? a.parent.rank : -1) - (b.parent ? b.parent.rank : -1) ||
        a.node.parent - b.node.parent ||
        a.node.node - b.node.node,
    );
    list.forEach((item, i) => {
      item.rank = i;
      const key = `${turn}\n${item.node.role}`,
        at = cells.get(key) || CARD.row;
      item.at = at;
      cells.set(key, at + item.h + CARD.row);
    });
  }
  // Node-wise plans have a base line: the prompts with siblings, from the root on.
  if (step.header.plan.startsWith("node_wise") || step.header.plan.startsWith("handoff"))
    for (const item of items) item.main = item.samples.length > 1;
  const heats = crossings(step, moves, items, of);
  const lanes = [],
    rows = new Map();
  for (const item of items)
    rows.set(item.node.role, Math.max(rows.get(item.node.role) || 0, item.at + item.h + CARD.row));
  let y = CARD.head;
  for (const role of step.roles)
    if (rows.has(role)) {
      const h = rows.get(role);
      lanes.push({ name: role, y, h, colour: roleColour(step.roles, role) });
      for (const item of items) if (item.node.role === role) item.y = y + item.at;
      y += h + 4;
    }
  for (const list of byTurn.values())
    list
      .slice()
      .sort((a, b) => a.y - b.y)
      .forEach((item, i, all) => {
        item.below = all[i + 1];
      });
  if (heats.length) {
    const below = new Map();
    let h = 0;
    for (const heat of heats) {
      heat.x = CARD.left + column.get(heat.turn) * (CARD.w + CARD.gap);
      heat.y = y + CARD.row + (below.get(heat.turn) || 0);
      below.set(heat.turn, heat.y + heat.h - y);
      h = Math.max(h, heat.y + heat.h - y + CARD.row);
    }
    lanes.push({ name: "joint actions", y, h, colour: palette().soft });
    y += h + 4;
  }
  for (const item of items)
    for (const s of item.samples) {
      const d = step.deviation(s);
      if (d !== null) most = Math.max(most === 1 ? 0 : most, Math.abs(d));
    }
  // An aligned joint action is a tie between the bars of its seats.
  const crossed = new Map(heats.flatMap((h) => h.moves.map((m) => [m, h])));
  const ties = moves.filter((m) => !crossed.has(m) && m.steps.filter((s) => s >= 0).length > 1);
  for (const tie of ties)
    for (const s of tie.steps)
      if (s >= 0) {
        const item = of.get(step.sample.get(s).node);
        (item.ties = item.ties || []).push(tie);
      }
  return {
    items,
    of,
    lanes,
    turns,
    heats,
    heatOf: crossed,
    ties,
    scale: most || 1,
    width: CARD.left + turns.length * (CARD.w + CARD.gap),
    height: y + 10,
    seat,
  };
}

// Places where every completion of a seat meets every completion of another: more joint actions than completions.
function crossings(step, moves, items, of) {
  const places = new Map();
  for (const m of moves) {
    const seats = m.steps.filter((s) => s >= 0);
    if (seats.length < 2) continue;
    const key = seats.map((s) => step.sample.get(s).node).join(",");
    places.has(key) ? places.get(key).push(m) : places.set(key, [m]);
  }
  const found = [];
  for (const [key, list] of places) {
    const two = key
      .split(",")
      .map(Number)
      .slice(0, 2)
      .map((n) => of.get(n));
    if (!two[0] || !two[1] || list.length <= Math.max(two[0].samples.length, two[1].samples.length)) continue;
    const size = clamp(Math.floor(128 / Math.max(two[0].samples.length, two[1].samples.length)), 3, 22);
    found.push({
      moves: list,
      rows: two[0],
      columns: two[1],
      seats: key.split(",").length,
      turn: two[0].node.turn,
      size,
      w: CARD.w,
      h: two[0].samples.length * size + 46,
    });
  }
  return found;
}
const barX = (item, i) => {
  const wide = Math.min(22, (CARD.w - 16) / Math.max(1, item.samples.length));
  return { x: item.x + 8 + i * wide, w: wide };
};
const barReach = (item) => (item.samples.length > 1 ? CARD.bars : 8); // the largest deviation in pixels
const barMiddle = (item) => item.y + item.h - barReach(item) - 4;
