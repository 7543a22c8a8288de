"""Durable chat models: a wrapped model's call is one activity."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.chat_models import BaseChatModel, generate_from_stream
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable, RunnableParallel, RunnableSequence, RunnableWithFallbacks, run_in_executor
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.tools import BaseTool
from pydantic import ConfigDict

from mongo_durable.errors import UnsupportedGraph
from mongo_durable.langgraph.codec import Codec
from mongo_durable.langgraph.effects import Effect, Policy, checked_in_thread, run_effect, run_effect_async, start_effect
from mongo_durable.langgraph.messages import message_digests, message_id, semantic_input
from mongo_durable.langgraph.scope import Session, current_session, here
from mongo_durable.langgraph.seams import parent_namespace, wants_tokens
from mongo_durable.protocol.events import ActivityKind


class DurableModel(BaseChatModel):
    """A chat model whose answers are recorded once; a replay does not call the provider. Outside a durable run it behaves like the model it wraps.

    It has no `_stream`: LangChain would reroute calls to it as soon as somebody streams, and each call would be two kinds of effect. Tokens are
    streamed all the same, from inside the recorded call.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    inner: BaseChatModel
    codec: Any
    policy: Policy
    activity_name: str

    @property
    def _llm_type(self) -> str:
        return self.inner._llm_type

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return dict(self.inner._identifying_params)

    @property
    def model_name(self) -> str | None:
        """The wrapped model's own name of what it calls: frameworks look profiles up by it."""
        named = getattr(self.inner, "model_name", None) or getattr(self.inner, "model", None)
        return named if isinstance(named, str) else None

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> Any:
        return self.inner._get_ls_params(stop=stop, **kwargs)

    def get_num_tokens(self, text: str) -> int:
        """As the wrapped model counts."""
        return self.inner.get_num_tokens(text)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """As the wrapped model counts."""
        return self.inner.get_num_tokens_from_messages(messages, tools)

    def bind_tools(self, tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool], **kwargs: Any) -> Runnable[Any, AIMessage]:
        """The wrapped model's own translation of the tools, bound to this model."""
        bound: Runnable[Any, AIMessage] = _rebind(self.inner.bind_tools(tools, **kwargs), self.inner, self)
        return bound

    def with_structured_output(self, schema: Any, *, include_raw: bool = False, **kwargs: Any) -> Runnable[Any, Any]:
        """The wrapped model's own way to structured output, through this model."""
        bound: Runnable[Any, Any] = _rebind(self.inner.with_structured_output(schema, include_raw=include_raw, **kwargs), self.inner, self)
        return bound

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any
    ) -> ChatResult:
        session = current_session()
        if session is None:
            return self.inner._generate(messages, stop=stop, run_manager=run_manager, **kwargs)
        effect = self._effect(session, messages, stop, kwargs)
        # The model gets copies: what it does to its messages must not reach the caller's objects.
        recorded = run_effect(effect, lambda _: _as_value(self._ask(effect, copy.deepcopy(messages), stop, run_manager, kwargs)))
        return self._result(effect, recorded)

    async def _agenerate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: AsyncCallbackManagerForLLMRun | None = None, **kwargs: Any
    ) -> ChatResult:
        session = current_session()
        if session is None:
            return await self.inner._agenerate(messages, stop=stop, run_manager=run_manager, **kwargs)
        effect = self._effect(session, messages, stop, kwargs)

        async def body(_: object) -> Any:
            return _as_value(await self._ask_async(effect, copy.deepcopy(messages), stop, run_manager, kwargs))

        return self._result(effect, await run_effect_async(effect, body))

    def _ask(
        self,
        effect: Effect,
        messages: list[BaseMessage],
        stop: list[str] | None,
        run_manager: CallbackManagerForLLMRun | None,
        options: dict[str, Any],
    ) -> ChatResult:
        """Call the wrapped model, token by token if somebody listens to tokens; they carry the id that the recorded message will have."""
        if run_manager is None or not wants_tokens(self.inner, run_manager, options, async_api=False):
            return self.inner._generate(messages, stop=stop, run_manager=run_manager, **options)
        chunks = []
        for chunk in self.inner._stream(messages, stop=stop, **options):
            chunk.message.id = message_id(f"{effect.identity}:message")
            run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            chunks.append(chunk)
        return generate_from_stream(iter(chunks))

    async def _ask_async(
        self,
        effect: Effect,
        messages: list[BaseMessage],
        stop: list[str] | None,
        run_manager: AsyncCallbackManagerForLLMRun | None,
        options: dict[str, Any],
    ) -> ChatResult:
        """See `_ask`."""
        if run_manager is None or not wants_tokens(self.inner, run_manager, options, async_api=True):
            if type(self.inner)._agenerate is not BaseChatModel._agenerate:
                return await self.inner._agenerate(messages, stop=stop, run_manager=run_manager, **options)
            # What LangChain does with a model that knows only `_generate`, and the last look at the lease on the other side.
            generate = checked_in_thread(effect, self.inner._generate)
            return await run_in_executor(None, generate, messages, stop, run_manager.get_sync() if run_manager else None, **options)
        chunks = []
        async for chunk in self.inner._astream(messages, stop=stop, **options):
            chunk.message.id = message_id(f"{effect.identity}:message")
            await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            chunks.append(chunk)
        return generate_from_stream(iter(chunks))

    def _effect(self, session: Session, messages: list[BaseMessage], stop: list[str] | None, options: dict[str, Any]) -> Effect:
        parts = message_digests(messages)
        meaning = semantic_input(parts, stop, options)
        return start_effect(
            session, self.codec, here(), ActivityKind.LLM, self.activity_name, meaning, self.policy, parts=parts, happened=_from_person
        )

    def _result(self, effect: Effect, recorded: Any) -> ChatResult:
        message = recorded["message"]
        # The tool calls of this answer get their places in its order, before any of them runs.
        effect.scope.root.reserve(parent_namespace(effect.scope.namespace), [message])
        generation = ChatGeneration(message=message, generation_info=recorded.get("info"))
        return ChatResult(generations=[generation], llm_output=recorded.get("output"))


def durable_model(model: BaseChatModel, codec: Codec, policy: Policy, name: str | None) -> DurableModel:
    """Wrap a chat model. A wrapped one is returned as it is."""
    if isinstance(model, DurableModel):
        return model
    if not isinstance(model, BaseChatModel):
        raise UnsupportedGraph(
            f"app.llm takes a chat model, not {type(model).__name__}: wrap the model first, then bind tools or structured output to the wrapped one"
        )
    return DurableModel(
        inner=model,
        codec=codec,
        policy=policy,
        activity_name=name or model_name(model),
        disable_streaming=True,
        profile=getattr(model, "profile", None),
    )


def model_name(model: BaseChatModel) -> str:
    """What the history calls a model: its own name, else its class."""
    if isinstance(model, DurableModel):
        return model.activity_name
    named = getattr(model, "model_name", None) or getattr(model, "model", None)
    return named if isinstance(named, str) and named else type(model).__name__


def _as_value(result: ChatResult) -> dict[str, Any]:
    # LangChain takes the first generation of a call; the others could never be seen.
    generation = result.generations[0]
    parts = {"message": generation.message, "info": generation.generation_info, "output": result.llm_output}
    return {name: part for name, part in parts.items() if part}


def _from_person(result: Any) -> dict[str, Any]:
    return {"message": AIMessage(content=result if isinstance(result, str) else str(result))}


def _rebind(runnable: Any, inner: BaseChatModel, outer: DurableModel) -> Any:
    """`runnable` with `outer` in the place of `inner`.

    Raises:
        UnsupportedGraph: It is built in a way in which the model cannot be found.
    """
    rebound = replace_models(runnable, lambda model: outer if model is inner else model)
    if rebound is runnable:
        raise UnsupportedGraph(
            f"{type(inner).__name__} builds its tool or structured-output binding as a {type(runnable).__name__}, where no call can be recorded: "
            "wrap such calls in an @app.activity"
        )
    return rebound


def replace_models(runnable: Any, replacement: Callable[[BaseChatModel], BaseChatModel]) -> Any:
    """`runnable` with the chat models inside it replaced; itself if there is none to replace. Nothing of the caller's is changed."""
    if isinstance(runnable, BaseChatModel):
        return replacement(runnable)
    if isinstance(runnable, RunnableBindingBase):
        bound = replace_models(runnable.bound, replacement)
        return runnable if bound is runnable.bound else runnable.model_copy(update={"bound": bound})
    if isinstance(runnable, RunnableSequence):
        steps = [replace_models(step, replacement) for step in runnable.steps]
        is_same = all(new is old for new, old in zip(steps, runnable.steps, strict=True))
        return runnable if is_same else RunnableSequence(*steps, name=runnable.name)
    if isinstance(runnable, RunnableParallel):
        branches = {name: replace_models(step, replacement) for name, step in runnable.steps__.items()}
        is_same = all(branches[name] is step for name, step in runnable.steps__.items())
        return runnable if is_same else RunnableParallel(branches)
    if isinstance(runnable, RunnableWithFallbacks):
        first = replace_models(runnable.runnable, replacement)
        others = [replace_models(each, replacement) for each in runnable.fallbacks]
        return runnable.model_copy(update={"runnable": first, "fallbacks": others})
    return runnable
