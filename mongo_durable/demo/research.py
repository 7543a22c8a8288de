"""The research agent: a deep agent with two sub-agents. What makes it durable is `app.deep_agent` in place of `create_deep_agent`.

root ── task ──> market   searches twice
  └──── task ──> survey   buys a report, which a person has to approve
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult

from mongo_durable import App, current_activity
from mongo_durable.demo.shop import Shop

WORKFLOW = "research"
BUYS = "buy_report"


def _call(tool: str, call: str, **arguments: Any) -> dict[str, Any]:
    return {"name": tool, "args": arguments, "id": call, "type": "tool_call"}


_SCRIPTS: dict[str, list[list[dict[str, Any]] | str]] = {
    "root": [
        [
            _call("task", "ask-market", description="What do standing desks cost?", subagent_type="market"),
            _call("task", "ask-survey", description="What do their owners say?", subagent_type="survey"),
        ],
        "Standing desks: {0} {1}",
    ],
    "market": [[_call("search", "search-new", query="new desks")], [_call("search", "search-used", query="used desks")], "new {0}, used {1}."],
    "survey": [[_call(BUYS, "buy", title="Desk survey", price=90)], "{0}."],
}
"""What each agent says, in turn: tool calls, or a text with the results of its calls."""


class ScriptedModel(BaseChatModel):
    """Says what its script has for the number of answers that it sees.

    Attributes:
        on_call: Is told of every call, as a provider's bill would be.
    """

    name_: str
    on_call: Callable[[str], None]

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        """Tools are known by their names."""
        return self.bind(tools=[tool.name for tool in tools], **kwargs)

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any
    ) -> ChatResult:
        self.on_call(self.name_)
        said = _SCRIPTS[self.name_][sum(isinstance(each, AIMessage) for each in messages)]
        results = [str(each.content) for each in messages if isinstance(each, ToolMessage)]
        message = AIMessage(said.format(*results)) if isinstance(said, str) else AIMessage("", tool_calls=said)
        return ChatResult(generations=[ChatGeneration(message=message)])

    async def _agenerate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: AsyncCallbackManagerForLLMRun | None = None, **kwargs: Any
    ) -> ChatResult:
        return self._generate(messages, stop, None, **kwargs)


def build_app(shop: Shop, pause: Callable[[str], Awaitable[None]]) -> App:
    """The durable agent. Its database is named by the environment.

    Args:
        pause: Is awaited by `buy_report` between its effect and the recording of its outcome: where it is worst to die.
    """
    app = App(WORKFLOW)

    def begin(effect: str) -> str:
        activity = current_activity()
        shop.note_beginning(effect, activity.activity_id, activity.attempt)
        return activity.activity_id

    @app.tool(idempotent=True)
    async def search(query: str) -> str:
        """Search for prices."""
        shop.note_once("search", begin("search"), query=query)
        return "480 EUR" if query.startswith("new") else "210 EUR"

    # The shop takes the activity id as idempotency key, so that running this twice does no harm.
    @app.tool(idempotent=True)
    async def buy_report(title: str, price: int) -> str:
        """Buy a report, in EUR."""
        shop.note_once(BUYS, begin(BUYS), title=title, price=price)
        await pause(BUYS)
        return "their owners stand by them"

    def model(name: str) -> BaseChatModel:
        def on_call(name: str) -> None:
            key = begin(f"model of {name}".replace(" ", "-"))
            shop.note(f"model-of-{name}", key)

        return app.llm(ScriptedModel(name_=name, on_call=on_call), name=name)

    @app.entrypoint
    def build() -> Any:
        return app.deep_agent(
            model=model("root"),
            system_prompt="Delegate the research, then sum it up.",
            subagents=[
                {"name": "market", "description": "Knows prices.", "system_prompt": "Search.", "model": model("market"), "tools": [search]},
                {
                    "name": "survey",
                    "description": "Knows owners.",
                    "system_prompt": "Buy a report.",
                    "model": model("survey"),
                    "tools": [buy_report],
                    "interrupt_on": {BUYS: True},
                },
            ],
        )

    return app
