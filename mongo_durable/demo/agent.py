"""The purchase agent: plain LangGraph. What makes it durable is `app.llm` around the model and `@app.tool` on the tools."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import SystemMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import interrupt

from mongo_durable import App, current_activity
from mongo_durable.demo.shop import Shop

WORKFLOW = "purchase"
APPROVAL_SCHEMA = {
    "type": "object",
    "required": ["approved"],
    "properties": {"approved": {"type": "boolean"}, "note": {"type": "string"}},
    "additionalProperties": False,
}
_INSTRUCTIONS = SystemMessage(
    "You buy office equipment. Call one tool at a time: first quote_price, then request_approval with the quoted amount, and place_order only when "
    "it was approved. Then say in one sentence what was bought and its order number."
)


async def _go_on(effect: str) -> None:
    return


def build_app(model: Callable[[Callable[[], None]], BaseChatModel], shop: Shop, pause: Callable[[str], Awaitable[None]] = _go_on) -> App:
    """The durable agent. Its database is named by the environment.

    Args:
        model: Makes the model; is given what a model that tells of its calls has to call.
        pause: Is awaited by `place_order` between its effect and the recording of its outcome: where it is worst to die.
    """
    app = App(WORKFLOW)

    def begin(effect: str) -> str:
        activity = current_activity()
        shop.note_beginning(effect, activity.activity_id, activity.attempt)
        return activity.activity_id

    @app.tool
    async def quote_price(item: str) -> str:
        """Ask the shop what an item costs, in EUR."""
        key = begin("quote_price")
        price = shop.price(item)
        shop.note("quote_price", key, item=item, price=price)
        return f"{price} EUR"

    @app.tool
    async def request_approval(item: str, amount: int) -> str:
        """Ask a person whether an item may be bought at this amount, in EUR."""
        key = begin("request_approval")
        answer = interrupt({"question": "May I buy this?", "item": item, "amount": amount, "currency": "EUR"}, response_schema=APPROVAL_SCHEMA)
        verdict = "approved" if answer["approved"] else "refused"
        shop.note("request_approval", key, verdict=verdict)
        return f"{verdict}: {answer['note']}" if "note" in answer else verdict

    # The shop takes the activity id as idempotency key, so that running this twice does no harm.
    @app.tool(idempotent=True)
    async def place_order(item: str, amount: int) -> str:
        """Order an item at an approved amount, in EUR."""
        key = begin("place_order")
        number = shop.place_order(key, item, amount)
        await pause("place_order")
        return number

    chat = app.llm(model(lambda: shop.note("model", begin("model"))), name="model").bind_tools(app.get_tools())

    async def agent(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await chat.ainvoke([_INSTRUCTIONS, *state["messages"]])]}

    @app.entrypoint
    def build() -> Any:
        graph = StateGraph(MessagesState)
        graph.add_node("agent", agent)
        graph.add_node("tools", ToolNode(app.get_tools()))
        graph.add_edge(START, "agent")
        graph.add_conditional_edges("agent", tools_condition)
        graph.add_edge("tools", "agent")
        return graph

    return app
