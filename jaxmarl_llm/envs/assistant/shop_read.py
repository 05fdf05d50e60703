"""The shop's records as an episode sees them, and the tools that only look.

The database is a plain mapping ``{"users", "orders", "products"}`` that is never changed. An *overlay* holds what an
episode changed: a tuple of ``((table, id), record as canonical JSON)``, small, hashable and picklable.

Shared arguments: ``db`` is the database, ``overlay`` the changes of an episode, ``table`` a name of the database, and
``key`` the id of a record. A tool returns (observation, overlay).
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

Database = Mapping[str, Mapping[str, Mapping[str, Any]]]
Overlay = tuple[tuple[tuple[str, str], str], ...]
Result = tuple[str, Overlay]  # observation, next overlay

EMPTY: Overlay = ()
ADDRESS = ("address1", "address2", "city", "state", "country", "zip")


class Refused(Exception):
    """A call against the shop's rules; its text is the observation."""


def read(db: Database, overlay: Overlay, table: str, key: str) -> dict[str, Any]:
    """A private copy of a record as the episode sees it. Refused if there is none."""
    for at, record in overlay:
        if at == (table, key):
            return json.loads(record)
    if key not in db[table]:
        raise Refused(f"{table[:-1]} not found")
    return json.loads(json.dumps(db[table][key]))


def write(overlay: Overlay, table: str, key: str, record: Mapping[str, Any]) -> Overlay:
    """The overlay after ``record`` was written."""
    changed = dict(overlay)
    changed[(table, key)] = json.dumps(record, sort_keys=True)
    return tuple(sorted(changed.items()))


def place(address: Mapping[str, str]) -> str:
    """Text of an ``address``."""
    return ", ".join(address[part] for part in ADDRESS if address.get(part))


def find_by_email(db: Database, overlay: Overlay, email: str) -> Result:
    """Tool: id of the user with this ``email``."""
    for user_id, user in db["users"].items():
        if user["email"].lower() == email.lower():
            return user_id, overlay
    raise Refused("user not found")


def find_by_name_zip(db: Database, overlay: Overlay, first_name: str, last_name: str, zip: str) -> Result:
    """Tool: id of the user with ``first_name``, ``last_name`` and ``zip``."""
    wanted = (first_name.lower(), last_name.lower(), zip)
    for user_id in db["users"]:
        user = (
            read(db, overlay, "users", user_id)
            if any(k == ("users", user_id) for k, _ in overlay)
            else db["users"][user_id]
        )
        name = user["name"]
        if (name["first_name"].lower(), name["last_name"].lower(), user["address"]["zip"]) == wanted:
            return user_id, overlay
    raise Refused("user not found")


def get_user(db: Database, overlay: Overlay, user_id: str) -> Result:
    """Tool: name, address, payment methods and orders of ``user_id``."""
    user = read(db, overlay, "users", user_id)
    pays = [
        m["id"] + (f" (balance ${m['balance']})" if "balance" in m else "") for m in user["payment_methods"].values()
    ]
    name = f"{user['name']['first_name']} {user['name']['last_name']}"
    return (
        f"{name}, {user['email']}; address: {place(user['address'])}; payment: {', '.join(pays)}; "
        f"orders: {', '.join(user['orders'])}"
    ), overlay


def get_order(db: Database, overlay: Overlay, order_id: str) -> Result:
    """Tool: items, payments and address of ``order_id``."""
    order = read(db, overlay, "orders", order_id)
    items = [
        f"{i['name']} item {i['item_id']} product {i['product_id']} ${i['price']} ({', '.join(i['options'].values())})"
        for i in order["items"]
    ]
    pays = [f"{p['transaction_type']} ${p['amount']} {p['payment_method_id']}" for p in order["payment_history"]]
    tracking = [t for f in order["fulfillments"] for t in f["tracking_id"]]
    return (
        f"{order_id} {order['status']}; {'; '.join(items)}; {', '.join(pays)}; to {place(order['address'])}"
        + (f"; tracking {', '.join(tracking)}" if tracking else "")
    ), overlay


def get_product(db: Database, overlay: Overlay, product_id: str) -> Result:
    """Tool: available variants of ``product_id``."""
    product = read(db, overlay, "products", product_id)
    variants = product["variants"].values()
    lines = [f"{v['item_id']} ${v['price']} ({', '.join(v['options'].values())})" for v in variants if v["available"]]
    return f"{product['name']}: {len(variants)} variants, available: {'; '.join(lines)}", overlay


def list_products(db: Database, overlay: Overlay) -> Result:
    """Tool: names and ids of all products."""
    return ", ".join(sorted(f"{p['name']} {key}" for key, p in db["products"].items())), overlay


def calculate(db: Database, overlay: Overlay, expression: str) -> Result:
    """Tool: value of an arithmetic ``expression``, rounded to cents."""
    if len(expression) > 200 or not set(expression) <= set("0123456789+-*/(). "):
        raise Refused("expression may hold numbers, + - * / ( ) only, up to 200 characters")
    try:
        return f"{round(float(_arithmetic(ast.parse(expression.strip(), mode='eval').body)), 2)}", overlay
    except (SyntaxError, ZeroDivisionError, OverflowError, RecursionError, ValueError) as error:
        raise Refused(f"cannot calculate: {type(error).__name__}") from None


def _arithmetic(node: ast.expr) -> float:
    """+ - * / over numbers; powers (``**``) are not offered, so the work stays small."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        value = _arithmetic(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        a, b = _arithmetic(node.left), _arithmetic(node.right)
        match node.op:
            case ast.Add():
                return a + b
            case ast.Sub():
                return a - b
            case ast.Mult():
                return a * b
            case ast.Div():
                return a / b
    raise ValueError("operation")
