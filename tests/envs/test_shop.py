"""The shop: gold action lists of tau-bench run, rules refuse what the policy forbids, and nothing is ever changed."""

import copy
import json
import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmarl_llm.data import loaders
from jaxmarl_llm.envs.assistant import shop

DB, _ = loaders.load_retail_db()
FULL = Path(os.environ.get("JAXMARL_DATA", Path(__file__).parents[3] / "shared" / "data"))


def run(db, actions):
    """(overlay, errors) after a list of actions."""
    overlay, errors = shop.EMPTY, []
    for action in actions:
        text, overlay = shop.call(db, overlay, action["name"], action["kwargs"])
        errors += [(action["name"], text)] if text.startswith("Error:") else []
    return overlay, errors


def order_with(db, status, source=None, single=True):
    """The first order of this status, paid by this kind of method."""
    for order in db["orders"].values():
        methods = db["users"][order["user_id"]]["payment_methods"]
        paid = methods[order["payment_history"][0]["payment_method_id"]]["source"]
        if order["status"] == status and source in (None, paid):
            return order
    raise LookupError(status)


def test_gold_lists_of_the_samples_run_and_change_the_database():
    seen = 0
    for split in ("train", "dev", "test"):
        for task in loaders.load("taubench_retail", split=split)[0]:
            overlay, errors = run(DB, task["actions"])
            assert not errors, (task["id"], errors)
            assert task["outputs"] or shop.db_hash(DB, overlay) != shop.db_hash(DB, shop.EMPTY), task["id"]
            seen += 1
    assert seen == 40


# Upstream's gold lists hold calls that its own rules refuse: gift cards with too little money, look-ups that are meant
# to miss, an exchange of a pending order. Counted once by hand; any other number is a bug here.
REFUSED = {"train": 19, "dev": 0, "test": 19}


@pytest.mark.skipif(not (FULL / "taubench_retail").is_dir(), reason="needs the full data (JAXMARL_DATA)")
@pytest.mark.parametrize("split", REFUSED)
def test_gold_lists_of_the_full_set(split):
    db, _ = loaders.load_retail_db(FULL)
    tasks, _ = loaders.load("taubench_retail", data_dir=FULL, split=split)
    refused = [e for t in tasks for e in [run(db, t["actions"])[1]] if e]
    assert len(refused) == REFUSED[split]
    allowed = ("balance is too low", "not found", "refunds go to", "is pending, not delivered")
    assert all(any(a in text for a in allowed) for errors in refused for _, text in errors)


def test_cancel_refunds_a_gift_card_and_nothing_else_is_touched():
    before = copy.deepcopy(DB)
    order = order_with(DB, "pending", "gift_card")
    paid = order["payment_history"][0]
    text, overlay = shop.call(
        DB, shop.EMPTY, "cancel_pending_order", {"order_id": order["order_id"], "reason": "no longer needed"}
    )
    assert text == f"Order {order['order_id']} cancelled."
    card = shop.read(DB, overlay, "users", order["user_id"])["payment_methods"][paid["payment_method_id"]]
    old = DB["users"][order["user_id"]]["payment_methods"][paid["payment_method_id"]]
    assert card["balance"] == pytest.approx(old["balance"] + paid["amount"])
    assert shop.read(DB, overlay, "orders", order["order_id"])["status"] == "cancelled"
    assert before == DB
    again, same = shop.call(
        DB, overlay, "cancel_pending_order", {"order_id": order["order_id"], "reason": "no longer needed"}
    )
    assert again.startswith("Error:") and same == overlay


def swap_of(order):
    """An item of the order and another available variant of its product."""
    for item in order["items"]:
        for new, variant in DB["products"][item["product_id"]]["variants"].items():
            if variant["available"] and new != item["item_id"]:
                return item, new, variant
    raise LookupError("no variant")


def test_order_of_calls_matters():
    """Items may be modified once and close the order: an address change works before, not after."""
    order = order_with(DB, "pending", "credit_card")
    item, new, variant = swap_of(order)
    key, pay = order["order_id"], order["payment_history"][0]["payment_method_id"]
    items = {
        "name": "modify_pending_order_items",
        "kwargs": {"order_id": key, "item_ids": [item["item_id"]], "new_item_ids": [new], "payment_method_id": pay},
    }
    place = dict(zip(shop.ADDRESS, ["1 Elm", "", "Rome", "NY", "USA", "10001"]))
    address = {"name": "modify_pending_order_address", "kwargs": {"order_id": key} | place}
    first, errors = run(DB, [address, items])
    assert not errors
    second, errors = run(DB, [items, address])
    assert [name for name, _ in errors] == ["modify_pending_order_address"]
    assert shop.db_hash(DB, first) != shop.db_hash(DB, second)
    record = shop.read(DB, first, "orders", key)
    assert record["address"] == place and new in [i["item_id"] for i in record["items"]]
    difference = round(variant["price"] - item["price"], 2)
    assert record["payment_history"][-1]["amount"] == pytest.approx(abs(difference))
    assert record["payment_history"][-1]["transaction_type"] == ("payment" if difference > 0 else "refund")


def test_independent_calls_commute_in_the_hash():
    a, b = [o for o in DB["orders"].values() if o["status"] == "pending"][:2]
    calls = [
        {"name": "cancel_pending_order", "kwargs": {"order_id": o["order_id"], "reason": "ordered by mistake"}}
        for o in (a, b)
    ]
    assert shop.db_hash(DB, run(DB, calls)[0]) == shop.db_hash(DB, run(DB, calls[::-1])[0])


def test_a_change_that_is_undone_does_not_count():
    user_id, user = next(iter(DB["users"].items()))
    back = {"name": "modify_user_address", "kwargs": {"user_id": user_id} | user["address"]}
    away = {"name": "modify_user_address", "kwargs": back["kwargs"] | {"city": "Nowhere"}}
    assert shop.db_hash(DB, run(DB, [away])[0]) != shop.db_hash(DB, shop.EMPTY)
    assert shop.db_hash(DB, run(DB, [away, back])[0]) == shop.db_hash(DB, shop.EMPTY)


def test_refunds_and_exchanges_follow_the_policy():
    order = order_with(DB, "delivered", "paypal")
    item, new, _ = swap_of(order)
    key, pay = order["order_id"], order["payment_history"][0]["payment_method_id"]
    kwargs = {"order_id": key, "item_ids": [item["item_id"]], "payment_method_id": pay}
    text, overlay = shop.call(DB, shop.EMPTY, "return_delivered_order_items", kwargs)
    assert text == f"Return requested for {key}."
    for wrong in (
        {"payment_method_id": "credit_card_0"},
        {"item_ids": ["0"]},
        {"item_ids": []},
        {"item_ids": [item["item_id"]] * 9},
        {"order_id": "#W0"},
    ):
        text, same = shop.call(DB, shop.EMPTY, "return_delivered_order_items", kwargs | wrong)
        assert text.startswith("Error:") and same == shop.EMPTY, wrong
    exchange = kwargs | {"new_item_ids": [new]}
    text, overlay = shop.call(DB, shop.EMPTY, "exchange_delivered_order_items", exchange)
    assert shop.read(DB, overlay, "orders", key)["status"] == "exchange requested"
    other = next(v for p, r in DB["products"].items() if p != item["product_id"] for v in r["variants"])
    for wrong in ({"new_item_ids": [other]}, {"new_item_ids": [new, new]}):
        assert shop.call(DB, shop.EMPTY, "exchange_delivered_order_items", exchange | wrong)[0].startswith("Error:")


def test_refunds_go_back_or_onto_a_gift_card():
    """Each delivered order of the samples, returned onto each of the customer's payment methods."""
    seen = set()
    for order in DB["orders"].values():
        if order["status"] == "delivered":
            for method in DB["users"][order["user_id"]]["payment_methods"].values():
                kwargs = {
                    "order_id": order["order_id"],
                    "item_ids": [order["items"][0]["item_id"]],
                    "payment_method_id": method["id"],
                }
                text, _ = shop.call(DB, shop.EMPTY, "return_delivered_order_items", kwargs)
                original = method["id"] == order["payment_history"][0]["payment_method_id"]
                assert text.startswith("Error:") != (original or method["source"] == "gift_card")
                seen.add((original, method["source"] == "gift_card"))
    assert len(seen) == 4


def test_reading_tools():
    user_id, user = next(iter(DB["users"].items()))
    name = user["name"] | {"zip": user["address"]["zip"]}
    assert shop.call(DB, (), "find_user_id_by_email", {"email": user["email"].upper()})[0] == user_id
    assert shop.call(DB, (), "find_user_id_by_name_zip", name)[0] == user_id
    assert user["orders"][0] in shop.call(DB, (), "get_user_details", {"user_id": user_id})[0]
    order = DB["orders"][user["orders"][0]]
    text = shop.call(DB, (), "get_order_details", {"order_id": order["order_id"]})[0]
    assert all(i["item_id"] in text and i["product_id"] in text for i in order["items"]) and order["status"] in text
    product = DB["products"][order["items"][0]["product_id"]]
    text = shop.call(DB, (), "get_product_details", {"product_id": product["product_id"]})[0]
    assert all((v["item_id"] in text) == v["available"] for v in product["variants"].values())
    assert product["product_id"] in shop.call(DB, (), "list_all_product_types", {})[0]


@pytest.mark.parametrize(
    "expression, text",
    [("2 + 3 * (4 - 1)", "11.0"), ("135.24 - 153.23", "-17.99"), ("10/4", "2.5"), ("-3", "-3.0")],
)
def test_calculate(expression, text):
    assert shop.call(DB, (), "calculate", {"expression": expression})[0] == text


@pytest.mark.parametrize(
    "expression", ["9**9**9", "1/0", "", "x", "__import__('os')", "(" * 100, "1" * 400, "()", "1 2"]
)
def test_calculate_refuses(expression):
    assert shop.call(DB, (), "calculate", {"expression": expression})[0].startswith("Error:")


def test_schemas_name_every_tool_once():
    names = [s["name"] for s in shop.SCHEMAS]
    assert len(names) == len(set(names)) == 16 and set(names) > shop.WRITES and len(shop.WRITES) == 7


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20) | st.sampled_from(sorted(DB["orders"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
keys = st.sampled_from(sorted({k for s in shop.SCHEMAS for k in s["parameters"]["properties"]})) | st.text(max_size=8)


@given(
    st.sampled_from([s["name"] for s in shop.SCHEMAS]) | st.text(max_size=20),
    st.dictionaries(keys, values, max_size=8),
)
@settings(max_examples=200, deadline=None)
def test_any_call_is_answered_and_pure(name, kwargs):
    """Only schema-valid writes change anything; the same call gives the same answer; overlays stay picklable."""
    text, overlay = shop.call(DB, shop.EMPTY, name, kwargs)
    assert (text, overlay) == shop.call(DB, shop.EMPTY, name, kwargs)
    assert pickle.loads(pickle.dumps(overlay)) == overlay and hash(overlay) is not None
    if text.startswith("Error:") or name not in shop.WRITES:
        assert overlay == shop.EMPTY
    json.dumps(text)
