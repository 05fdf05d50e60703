// One step of a run: rows from columns, and what leads from one row to another.
class Step {
  constructor(data, run) {
    this.run = run;
    this.header = data.header;
    this.tasks = data.tasks;
    for (const [kind, columns] of Object.entries(data.tables)) {
      const names = Object.keys(columns),
        rows = (columns[names[0]] || []).map(() => ({}));
      for (const name of names)
        columns[name].forEach((value, i) => {
          rows[i][name] = value;
        });
      this[
        {
          task: "taskRows",
          node: "nodes",
          step: "steps",
          transition: "moves",
          group: "groups",
          memory: "memory",
          failure: "failures",
        }[kind]
      ] = rows;
    }
    const by = (rows, key) => {
      const map = new Map();
      for (const row of rows) map.has(row[key]) ? map.get(row[key]).push(row) : map.set(row[key], [row]);
      return map;
    };
    this.node = new Map(this.nodes.map((n) => [n.node, n]));
    this.sample = new Map(this.steps.map((s) => [s.step, s]));
    this.move = new Map(this.moves.map((m) => [m.transition, m]));
    this.group = new Map(this.groups.map((g) => [g.group, g]));
    this.siblings = by(this.steps, "node");
    this.nodesOf = by(this.nodes, "task");
    this.movesOf = by(this.moves, "task");
    this.nodesAfter = by(this.nodes, "parent");
    this.movesWith = new Map();
    for (const m of this.moves)
      for (const s of m.steps)
        if (s >= 0) this.movesWith.has(s) ? this.movesWith.get(s).push(m) : this.movesWith.set(s, [m]);
    this.reads = by(
      this.memory.filter((e) => e.event === "read"),
      "node",
    );
    // Entries that a completion wrote, by completion.
    this.entries = by(
      this.memory.filter((e) => e.completion >= 0),
      "completion",
    );
    this.most = Math.max(1e-12, ...chunked(this.steps.map((s) => Math.abs(s.advantage || 0))));
  }
  get roles() {
    return this.header.roles;
  }
  samples(node) {
    return this.siblings.get(node) || [];
  }
  // The group of a prompt: of its first completion that was compared.
  groupOf(node) {
    const s = this.samples(node).find((x) => x.group >= 0);
    return s ? this.group.get(s.group) : null;
  }
  get heldOut() {
    return this.header.split === "held_out";
  }
  // Return around the mean of the group. An evaluation compares nobody: 0 where the return is known.
  deviation(sample) {
    if (this.heldOut) return sample.returns === null ? null : 0;
    const g = this.group.get(sample.group);
    return g && sample.returns !== null && g.mean !== null ? sample.returns - g.mean : null;
  }
  // Weighted reward of one role in one joint action; null where a part is unknown.
  reward(move, role) {
    const i = this.roles.indexOf(role);
    let total = 0;
    for (const [name, weight] of Object.entries(this.header.weights)) {
      const value = move.rewards[name] ? move.rewards[name][i] : null;
      if (value === null || weight === null) return null;
      total += weight * value;
    }
    return move.valid ? total : null;
  }
  actors(move) {
    return move.steps.filter((s) => s >= 0).map((s) => this.node.get(this.sample.get(s).node).role);
  }
  jointReward(move) {
    const found = this.actors(move).map((role) => this.reward(move, role));
    return found.includes(null) ? null : mean(found);
  }
  // Joint actions that led to a prompt, the first one first.
  before(node) {
    const found = [];
    for (let m = this.move.get(node.parent); m; m = this.move.get(m.parent)) found.push(m);
    return found.reverse();
  }
  // Prompts that stand together: of one task, behind one joint action, in one turn.
  together(node) {
    return (this.nodesAfter.get(node.parent) || []).filter((n) => n.task === node.task && n.turn === node.turn);
  }
}
// Lists too long for the arguments of a call: largest values of pieces.
function chunked(values) {
  const out = [];
  for (let i = 0; i < values.length; i += 10000) out.push(Math.max(...values.slice(i, i + 10000)));
  return out;
}
const isOpponent = (s) => s.source !== "policy";
const WHY = {
  trained: "It is in the update.",
  held_out: "An evaluation played it, which trains nobody.",
  opponent: "A model that does not learn played it.",
  expert: "An expert wrote it: imitated where the recipe does so.",
  no_return: "No return is known, so it teaches nothing. An unknown reward is not 0.",
  group_not_selected: "The algorithm left its group out.",
  role_not_trainable: "Its role does not learn in this step.",
  not_drawn: "The selection of completions left it out.",
};
