"""The demo's chat model: a scripted one that needs no key, or any that LangChain knows by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult

from mongo_durable.errors import ConfigurationError


class ScriptedModel(BaseChatModel):
    """Buys what it is asked for: price, approval, order, report. What it says follows from the messages it sees alone.

    Attributes:
        on_call: Is told of every call, as a provider's bill would be.
    """

    on_call: Callable[[], None]

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Any:
        """Tools are known by their names."""
        return self.bind(tools=[tool.name for tool in tools], **kwargs)

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any
    ) -> ChatResult:
        self.on_call()
        return ChatResult(generations=[ChatGeneration(message=_next_message(messages))])

    async def _agenerate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: AsyncCallbackManagerForLLMRun | None = None, **kwargs: Any
    ) -> ChatResult:
        return self._generate(messages, stop, None, **kwargs)


def _next_message(messages: Sequence[BaseMessage]) -> AIMessage:
    asked = max(index for index, message in enumerate(messages) if isinstance(message, HumanMessage))
    item = re.sub(r"(?i)^.*?\bbuy\s+(?:an?\s+)?|\W*$", "", str(messages[asked].content))
    results = {message.name: str(message.content) for message in messages[asked:] if isinstance(message, ToolMessage)}
    if "quote_price" not in results:
        return _call("quote_price", item=item)
    amount = int(re.sub(r"\D", "", results["quote_price"]))
    if "request_approval" not in results:
        return _call("request_approval", item=item, amount=amount)
    if not results["request_approval"].startswith("approved"):
        return AIMessage(f"I did not buy the {item}: {results['request_approval']}.")
    if "place_order" not in results:
        return _call("place_order", item=item, amount=amount)
    return AIMessage(f"Bought: {item} for {amount} EUR, order {results['place_order']}.")


def _call(tool: str, **arguments: Any) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": tool, "args": arguments, "id": f"call_{tool}"}])


def named_model(name: str) -> BaseChatModel:
    """The model that LangChain knows as `provider:name`.

    Raises:
        ConfigurationError: LangChain or the provider's package is not installed, or there is no such provider.
    """
    try:
        from langchain.chat_models import init_chat_model
    except ImportError as error:
        raise ConfigurationError(f"--model needs the package langchain ({error}): pip install langchain, and the provider's package") from None
    try:
        model = init_chat_model(name)
    except (ImportError, ValueError) as error:
        raise ConfigurationError(f"--model {name}: {error}") from None
    assert isinstance(model, BaseChatModel)
    return model
