"""What the runners of the compose files execute: a purchase that somebody has to approve. Put your own module in its place."""

from __future__ import annotations

from typing import TypedDict

from langgraph.graph import START, StateGraph
from langgraph.types import interrupt

from mongo_durable import App


class Order(TypedDict, total=False):
    """What a run carries."""

    item: str
    price: int
    bought: bool


app = App("procurement")


@app.activity(idempotent=True)
async def quote(item: str) -> int:
    """Ask a supplier for a price."""
    return 7 * len(item)


async def ask(order: Order) -> Order:
    """Ask a person."""
    price = await quote(order["item"])
    return {"price": price, "bought": bool(interrupt({"question": f"Buy {order['item']} for {price}?"}))}


@app.entrypoint
def build() -> StateGraph:
    """The graph."""
    graph = StateGraph(Order)
    graph.add_node("ask", ask)
    graph.add_edge(START, "ask")
    return graph
