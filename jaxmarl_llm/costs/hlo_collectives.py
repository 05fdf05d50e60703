"""Bytes that a chip sends in the collectives of a compiled program, by the ring algorithm on their n participants.

| kind | bytes sent |
| --- | --- |
| all-gather | (n-1)/n of the result, which is n operands |
| reduce-scatter, all-to-all | (n-1)/n of the operand |
| all-reduce | 2 (n-1)/n of the operand |
| collective-permute | the operand |

libtpu writes two of them in forms of its own. An asynchronous collective is a chain of fusions that all hold the
collective: one starts the chain, others compute beside it, one ends it. It is sent once, by the fusion that starts it.
A reduce-scatter is a fusion of an all-reduce and a slice of each result for this chip.
"""

from __future__ import annotations

import math
import re

from jaxmarl_llm.costs.hlo_text import Computation, Instruction

SENT = {
    "all-gather": lambda n: n - 1.0,
    "all-reduce": lambda n: 2.0 * (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1.0) / n,
    "all-to-all": lambda n: (n - 1.0) / n,
    "collective-permute": lambda n: 1.0,
}
START, DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"
CHAIN = "async_collective_fusion_config"


def target(i: Instruction) -> str:
    """Target of a custom call ``i``; empty for other instructions."""
    return i.attributes.get("custom_call_target", "").strip('"') if i.op == "custom-call" else ""


def is_continued(inside: Computation, i: Instruction) -> bool:
    """Whether a collective ``i`` belongs to an asynchronous one that another fusion starts. inside: its computation."""
    users = [target(user) for user, _ in inside.users[i.name]]
    if START in users:
        return False
    return DONE in users or CHAIN in i.attributes.get("backend_config", "")


def chain(i: Instruction) -> tuple[str, ...]:
    """Key that the parts of one asynchronous collective share. i: one of them."""
    return tuple(i.attributes.get(name, "") for name in ("channel_id", "frontend_attributes", "replica_groups"))


def sent(inside: Computation, i: Instruction, devices: int, fused: bool) -> tuple[str, float] | None:
    """Kind of a collective and the bytes that a chip sends; None for other instructions.

    inside: computation of the instruction ``i``. devices: participants where its groups are empty. fused: whether the
    computation is that of a fusion. Raises HloError for a collective without a rule.
    """
    kind = i.op.removesuffix("-start")
    if kind not in SENT:
        return None
    given = sum(a.bytes for operand in inside.operands(i) for a in operand.result)
    n = participants(i, devices)
    if kind == "all-reduce" and fused and _is_scattered(inside, i, n):
        kind = "reduce-scatter"
    return kind, SENT[kind](n) * given if n > 1 else 0.0


def participants(i: Instruction, devices: int) -> int:
    """Number of participants of a collective ``i``. devices: the number where its groups are empty."""
    if i.op.startswith("collective-permute"):
        pairs = i.integers("source_target_pairs")
        if not pairs:
            raise i.error("a collective-permute without pairs has no rule")
        return 2 if any(a != b for a, b in zip(pairs[::2], pairs[1::2])) else 1
    groups = i.attributes.get("replica_groups", "")
    if groups == "{}":
        return devices
    if match := re.match(r"\[\d+,(\d+)\]<=", groups):
        return int(match.group(1))
    if match := re.match(r"mesh\[([^\]]*)\] *\{([^}]*)\}$", groups):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", match.group(1)))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", match.group(2)))
    sizes_of = {len(group.split(",")) for group in re.findall(r"\{([\d,]+)\}", groups)}
    if len(sizes_of) != 1:
        raise i.error(f"replica groups of a form without a rule: {groups[:80]!r}")
    return sizes_of.pop()


def _is_scattered(inside: Computation, i: Instruction, n: int) -> bool:
    """Whether only an n-th of each result of an all-reduce ``i`` is used: the slice of this chip."""
    cut = [_only_slice(inside, i, n)] if not isinstance(i.type, tuple) else []
    for user, _ in inside.users[i.name] if isinstance(i.type, tuple) else ():
        cut.append(user.op == "get-tuple-element" and _only_slice(inside, user, n))
    scattered = bool(cut) and all(cut)
    if inside.name.startswith("all-reduce-scatter") and not scattered:
        raise i.error("an all-reduce-scatter fusion of this form has no rule")
    return scattered


def _only_slice(inside: Computation, i: Instruction, n: int) -> bool:
    users = [user for user, _ in inside.users[i.name]]
    if len(users) == 1 and users[0].op in ("bitcast", "convert", "copy", "reshape", "transpose"):
        return _only_slice(inside, users[0], n)
    whole = sum(a.elements for a in i.result)
    return bool(users) and all(
        user.op == "dynamic-slice" and sum(a.elements for a in user.result) * n == whole for user in users
    )
