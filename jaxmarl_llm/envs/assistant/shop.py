"""An online shop: sixteen tools over an immutable database, written from tau-bench's policy (wiki.md) and data files.

``call`` is pure: it returns the observation and the next overlay (see ``retail_read``); an error is text that starts
with ``Error:`` and changes nothing. ``db_hash`` of the final contents is tau-bench's verdict. Observations of the get
tools are compact lines instead of JSON, for short prompts. Money is in dollars, rounded to cents.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from jaxmarl_llm.envs.assistant.shop_read import (
    ADDRESS,
    EMPTY,
    Database,
    Overlay,
    Refused,
    Result,
    calculate,
    find_by_email,
    find_by_name_zip,
    get_order,
    get_product,
    get_user,
    list_products,
    place,
    read,
    write,
)

__all__ = ["ADDRESS", "EMPTY", "REASONS", "SCHEMAS", "WRITES", "Database", "Overlay", "call", "db_hash", "read"]

REASONS = ("no longer needed", "ordered by mistake")


def db_hash(db: Database, overlay: Overlay) -> str:
    """SHA-256 of the changes of ``overlay`` relative to ``db``: equal hashes are equal final contents.

    A record that was written back unchanged does not count. Two databases must not be compared with each other.
    """
    changed = {k: v for k, v in overlay if json.loads(v) != db[k[0]].get(k[1])}
    return hashlib.sha256(json.dumps(sorted(changed.items())).encode()).hexdigest()


# -- shared rules ------------------------------------------------------------------------------------------------------


def _order(db: Database, overlay: Overlay, order_id: str, status: str) -> dict[str, Any]:
    order = read(db, overlay, "orders", order_id)
    if order["status"] != status:
        raise Refused(f"order {order_id} is {order['status']}, not {status}")
    return order


def _payment(user: Mapping[str, Any], payment_id: str) -> dict[str, Any]:
    if payment_id not in user["payment_methods"]:
        raise Refused("payment method not found")
    return user["payment_methods"][payment_id]


def _own_items(order: Mapping[str, Any], item_ids: list[str]) -> None:
    have = Counter(item["item_id"] for item in order["items"])
    missing = Counter(item_ids) - have
    if missing or not item_ids:
        raise Refused(f"item {next(iter(missing), '')} not in the order" if missing else "no items given")


def _swap(db: Database, order: Mapping[str, Any], old: list[str], new: list[str]) -> tuple[list[dict], float]:
    """The order's items after exchanging old[i] for new[i], and the price difference (positive: the customer pays)."""
    _own_items(order, old)
    if len(old) != len(new):
        raise Refused("item_ids and new_item_ids must have equal length")
    items, difference = [dict(item) for item in order["items"]], 0.0
    todo = list(range(len(items)))
    for old_id, new_id in zip(old, new):
        at = next(i for i in todo if items[i]["item_id"] == old_id)
        todo.remove(at)
        variant = db["products"][items[at]["product_id"]]["variants"].get(new_id)
        if variant is None or not variant["available"]:
            raise Refused(f"new item {new_id} is not available for this product")
        difference += variant["price"] - items[at]["price"]
        items[at] |= {"item_id": new_id, "price": variant["price"], "options": variant["options"]}
    return items, round(difference, 2)


def _can_pay(method: Mapping[str, Any], amount: float) -> None:
    if method["source"] == "gift_card" and method["balance"] < amount:
        raise Refused("gift card balance is too low")


def _charge(user: dict[str, Any], payment_id: str, amount: float) -> None:
    """Takes ``amount`` from a gift card (negative: gives back); other methods keep no balance."""
    method = user["payment_methods"][payment_id]
    if method["source"] == "gift_card":
        method["balance"] = round(method["balance"] - amount, 2)


def _entry(kind: str, amount: float, payment_id: str) -> dict[str, Any]:
    return {"transaction_type": kind, "amount": abs(amount), "payment_method_id": payment_id}


def _save(overlay: Overlay, order: Mapping[str, Any], user: Mapping[str, Any] | None = None) -> Overlay:
    overlay = write(overlay, "orders", order["order_id"], order)
    if user is None:
        return overlay
    return write(overlay, "users", order["user_id"], user)


def _address(kwargs: Mapping[str, str]) -> dict[str, str]:
    return {part: kwargs[part] for part in ADDRESS}


# -- writing -----------------------------------------------------------------------------------------------------------


def _cancel(db: Database, overlay: Overlay, order_id: str, reason: str) -> Result:
    order = _order(db, overlay, order_id, "pending")
    if reason not in REASONS:
        raise Refused(f"reason must be one of: {', '.join(REASONS)}")
    user = read(db, overlay, "users", order["user_id"])
    refunds = [_entry("refund", p["amount"], p["payment_method_id"]) for p in order["payment_history"]]
    for p in order["payment_history"]:
        _charge(user, p["payment_method_id"], -p["amount"])
    order |= {"status": "cancelled", "cancel_reason": reason, "payment_history": order["payment_history"] + refunds}
    return f"Order {order_id} cancelled.", _save(overlay, order, user)


def _modify_address(db: Database, overlay: Overlay, order_id: str, **parts: str) -> Result:
    order = _order(db, overlay, order_id, "pending")
    order["address"] = _address(parts)
    return f"Order {order_id} goes to {place(order['address'])}.", _save(overlay, order)


def _modify_items(
    db: Database, overlay: Overlay, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
) -> Result:
    order = _order(db, overlay, order_id, "pending")
    items, difference = _swap(db, order, item_ids, new_item_ids)
    user = read(db, overlay, "users", order["user_id"])
    _can_pay(_payment(user, payment_method_id), difference)
    _charge(user, payment_method_id, difference)
    entry = _entry("payment" if difference > 0 else "refund", difference, payment_method_id)
    order |= {
        "items": items,
        "status": "pending (item modified)",
        "payment_history": [*order["payment_history"], entry],
    }
    return f"Order {order_id} modified; difference ${difference}.", _save(overlay, order, user)


def _modify_payment(db: Database, overlay: Overlay, order_id: str, payment_method_id: str) -> Result:
    order = _order(db, overlay, order_id, "pending")
    user = read(db, overlay, "users", order["user_id"])
    method, history = _payment(user, payment_method_id), order["payment_history"]
    if len(history) != 1 or history[0]["transaction_type"] != "payment":
        raise Refused("there must be exactly one payment")
    paid, old = history[0]["amount"], history[0]["payment_method_id"]
    if old == payment_method_id:
        raise Refused("the new payment method is the current one")
    _can_pay(method, paid)
    _charge(user, payment_method_id, paid)
    _charge(user, old, -paid)
    order["payment_history"] = [*history, _entry("payment", paid, payment_method_id), _entry("refund", paid, old)]
    return f"Order {order_id} is now paid by {payment_method_id}.", _save(overlay, order, user)


def _modify_user(db: Database, overlay: Overlay, user_id: str, **parts: str) -> Result:
    user = read(db, overlay, "users", user_id)
    user["address"] = _address(parts)
    return f"User {user_id} lives at {place(user['address'])}.", write(overlay, "users", user_id, user)


def _return(db: Database, overlay: Overlay, order_id: str, item_ids: list[str], payment_method_id: str) -> Result:
    order = _order(db, overlay, order_id, "delivered")
    method = _payment(read(db, overlay, "users", order["user_id"]), payment_method_id)
    original = order["payment_history"][0]["payment_method_id"]
    if method["source"] != "gift_card" and payment_method_id != original:
        raise Refused("refunds go to the original payment method or a gift card")
    _own_items(order, item_ids)
    order |= {
        "status": "return requested",
        "return_items": sorted(item_ids),
        "return_payment_method_id": payment_method_id,
    }
    return f"Return requested for {order_id}.", _save(overlay, order)


def _exchange(
    db: Database, overlay: Overlay, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
) -> Result:
    order = _order(db, overlay, order_id, "delivered")
    _, difference = _swap(db, order, item_ids, new_item_ids)
    _can_pay(_payment(read(db, overlay, "users", order["user_id"]), payment_method_id), difference)
    order |= {
        "status": "exchange requested",
        "exchange_items": sorted(item_ids),
        "exchange_new_items": sorted(new_item_ids),
        "exchange_payment_method_id": payment_method_id,
        "exchange_price_difference": difference,
    }
    return f"Exchange requested for {order_id}; difference ${difference}.", _save(overlay, order)


def _say(text: str) -> Callable[..., Result]:
    return lambda db, overlay, **_: (text, overlay)


# -- the table ---------------------------------------------------------------------------------------------------------

_T, _L = {"type": "string"}, {"type": "array", "items": {"type": "string"}}
_PLACE: dict[str, dict] = dict.fromkeys(ADDRESS, _T)
_ITEMS: dict[str, dict] = {"order_id": _T, "item_ids": _L, "new_item_ids": _L, "payment_method_id": _T}
# name -> (function, changes the database, description, parameters); every parameter is required
_TOOLS: dict[str, tuple[Callable[..., Result], bool, str, dict[str, dict]]] = {
    "find_user_id_by_email": (find_by_email, False, "User id by email.", {"email": _T}),
    "find_user_id_by_name_zip": (
        find_by_name_zip, False, "User id by name and zip.", {"first_name": _T, "last_name": _T, "zip": _T}
    ),
    "get_user_details": (get_user, False, "Profile, payment methods and orders.", {"user_id": _T}),
    "get_order_details": (get_order, False, "Status, items and payment of an order.", {"order_id": _T}),
    "get_product_details": (get_product, False, "Available items of a product.", {"product_id": _T}),
    "list_all_product_types": (list_products, False, "All products with their ids.", {}),
    "calculate": (calculate, False, "Arithmetic.", {"expression": _T}),
    "think": (_say(""), False, "Notes a thought.", {"thought": _T}),
    "transfer_to_human_agents": (_say("Transfer successful"), False, "Hands over to a person.", {"summary": _T}),
    "cancel_pending_order": (
        _cancel, True, "Cancels a pending order.", {"order_id": _T, "reason": {**_T, "enum": list(REASONS)}}
    ),
    "modify_pending_order_address": (
        _modify_address, True, "New address of a pending order.", {"order_id": _T, **_PLACE}
    ),
    "modify_pending_order_items": (_modify_items, True, "Swaps items of a pending order, once.", _ITEMS),
    "modify_pending_order_payment": (
        _modify_payment, True, "New payment of a pending order.", {"order_id": _T, "payment_method_id": _T}
    ),
    "modify_user_address": (_modify_user, True, "New default address.", {"user_id": _T, **_PLACE}),
    "return_delivered_order_items": (
        _return, True, "Returns delivered items.", {"order_id": _T, "item_ids": _L, "payment_method_id": _T}
    ),
    "exchange_delivered_order_items": (_exchange, True, "Exchanges delivered items, once.", _ITEMS),
}  # fmt: skip

WRITES = frozenset(name for name, (_, changes, _, _) in _TOOLS.items() if changes)
SCHEMAS: tuple[dict[str, Any], ...] = tuple(
    {
        "name": name,
        "description": text,
        "parameters": {"type": "object", "properties": parameters, "required": list(parameters)},
    }
    for name, (_, _, text, parameters) in _TOOLS.items()
)


def _check(parameters: Mapping[str, Mapping], kwargs: Mapping[str, Any]) -> None:
    for key in parameters:
        if key not in kwargs:
            raise Refused(f"missing argument {key}")
    for key, value in kwargs.items():
        if key not in parameters:
            raise Refused(f"unknown argument {str(key)[:40]}")
        if parameters[key]["type"] == "string" and not isinstance(value, str):
            raise Refused(f"argument {key} must be a string")
        if parameters[key]["type"] == "array" and not (
            isinstance(value, list) and all(isinstance(v, str) for v in value)
        ):
            raise Refused(f"argument {key} must be a list of strings")


def call(db: Database, overlay: Overlay, name: str, kwargs: Mapping[str, Any]) -> Result:
    """Run the tool ``name`` with the arguments ``kwargs``. Any name and any JSON arguments are accepted.

    ``db``: the database. ``overlay``: changes so far. A refusal is ``("Error: ...", overlay)``.
    """
    if name not in _TOOLS:
        return f"Error: unknown tool {name[:40]}", overlay
    function, _, _, parameters = _TOOLS[name]
    try:
        _check(parameters, kwargs)
        return function(db, overlay, **kwargs)
    except Refused as refusal:
        return f"Error: {refusal}", overlay
