"""`App`: a named, versioned workflow. It makes models, tools and other effects durable, and runs the graph in LangGraph's own shape."""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import functools
import logging
import os
import sys
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_core.tools import BaseTool
from langchain_core.tools import tool as langchain_tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import StateGraph

from mongo_durable.encryption import Cipher
from mongo_durable.engine.authorizing import Authorize
from mongo_durable.engine.loop_thread import LoopThread
from mongo_durable.engine.policy import OnUnknownOutcome, RetryPolicy, WhenBusy, check_on_unknown_outcome
from mongo_durable.engine.process import DEFAULT_LEASE, Process
from mongo_durable.errors import (
    ConfigurationError,
    UnsupportedGraph,
)
from mongo_durable.langgraph import questions, timers
from mongo_durable.langgraph import tool_node as tool_nodes
from mongo_durable.langgraph.activities import durable_function
from mongo_durable.langgraph.checkpointer import DurableCheckpointer
from mongo_durable.langgraph.codec import Codec
from mongo_durable.langgraph.committed import root_config, seed
from mongo_durable.langgraph.driver import Asleep
from mongo_durable.langgraph.effects import Policy
from mongo_durable.langgraph.execution import Executor, Work
from mongo_durable.langgraph.interrupt_types import InterruptTypes
from mongo_durable.langgraph.models import DurableModel, durable_model
from mongo_durable.langgraph.questions import public_interrupts
from mongo_durable.langgraph.redaction import Redact
from mongo_durable.langgraph.stable_ids import with_stable_ids
from mongo_durable.langgraph.streaming import Replay, StreamRequest
from mongo_durable.langgraph.swallowed import with_answers_checked
from mongo_durable.langgraph.tools import DurableTool, durable_tool
from mongo_durable.langgraph.topology import check_graph
from mongo_durable.protocol.canonical import digest
from mongo_durable.protocol.frontier import UNANSWERED
from mongo_durable.store import frontiers, runs, schema
from mongo_durable.store.claims import Claim
from mongo_durable.store.connection import DEFAULT_DATABASE, Endpoint

if TYPE_CHECKING:
    from langchain.agents.middleware import AgentMiddleware

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M")

URI_VARIABLE = "MONGO_DURABLE_URI"
DATABASE_VARIABLE = "MONGO_DURABLE_DATABASE"


@functools.cache
def _engine_loop() -> LoopThread:
    """The event loop on which the engine lives for synchronous callers: one a process."""
    thread = LoopThread("mongo_durable-engine")
    atexit.register(thread.close)
    return thread


class App:
    """A workflow: a graph under a name and a version, whose effects are durable.

    Args:
        name: Of the workflow; with the version, what a runner serves.
        version: A run belongs to the version that started it.
        uri: MongoDB URI; None takes `MONGO_DURABLE_URI`.
        database: Database name; None takes `MONGO_DURABLE_DATABASE`, else `mongo_durable`.
        client: A client that the application holds (`AsyncMongoClient` or `AsyncIOMotorClient`), instead of a URI.
        types: Pydantic models, dataclasses, enums and exceptions of the application that may stand in inputs, outputs and results.
        sync: The graph is synchronous: a runner runs it in a thread, as `invoke` does.
        lease: How long this process may be silent before others take its runs over.
        max_crashes: After so many processes in a row that died while they executed a run, and recorded nothing more of it, the run is parked: it
            fails with RunParked and kills no more. Somebody can retry it.
        authorize: Says who may answer what, for answers that come by `Command(resume=…)`; who answers is `configurable["resolved_by"]`. Give it to
            every `DurableClient` too (`authorize=app.authorize`). Whoever can write to the database can go past it: that is what roles are for.
        redact: What the history shows of an effect's input: it gets kind, name and arguments, and returns what is shown in their place, also to a
            person who is asked whether the effect happened. It changes nothing else: digests and outcomes are those of the true values. It is called
            again in every attempt. If it raises, nothing of the input is shown.
        cipher: Encrypts every stored value: see `mongo_durable.encryption`. Clients that answer need the same keys.
    """

    def __init__(
        self,
        name: str,
        *,
        version: str = "1",
        uri: str | None = None,
        database: str | None = None,
        client: Any = None,
        types: Iterable[type] = (),
        sync: bool = False,
        lease: timedelta = DEFAULT_LEASE,
        max_crashes: int = 5,
        authorize: Authorize | None = None,
        redact: Redact | None = None,
        cipher: Cipher | None = None,
    ) -> None:
        if not name or not version:
            raise ConfigurationError("an App needs a name and a version")
        if max_crashes < 1:
            raise ConfigurationError("max_crashes is at least 1")
        self.max_crashes = max_crashes
        self.authorize = authorize
        self.name = name
        self.version = version
        self.is_sync = sync
        self.redact = redact
        self.cipher = cipher
        self.codec = Codec(types)
        self.interrupt_types = InterruptTypes()
        self._uri = uri
        self._database = database
        self._client = client
        self._lease = lease
        self._tools: dict[str, DurableTool] = {}
        self._build: Callable[[], Any] | None = None
        self._graph: Any = None
        self.topology: str | None = None
        self._endpoint: Endpoint | None = None
        self._executor = Executor(self)
        self._processes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Process] = weakref.WeakKeyDictionary()

    # -- where the database is ------------------------------------------------------------------------------------------------------------------

    @property
    def endpoint(self) -> Endpoint:
        """The database of this app.

        Raises:
            ConfigurationError: Neither uri, client nor `MONGO_DURABLE_URI` was given.
        """
        if self._endpoint is None:
            uri = self._uri or (os.environ.get(URI_VARIABLE) if self._client is None else None)
            database = self._database or os.environ.get(DATABASE_VARIABLE, DEFAULT_DATABASE)
            self._endpoint = Endpoint(uri, database, self._client, self.cipher)
        return self._endpoint

    def process(self) -> Process:
        """What this process shares between the app's runs, on the running loop."""
        loop = asyncio.get_running_loop()
        found = self._processes.get(loop)
        if found is None or found.connection.is_closed:
            found = self._processes[loop] = Process(self.endpoint, self._lease)
        return found

    def use_process(self, process: Process) -> None:
        """Share one identity, lease and change stream with other apps on the running loop. Who made the process closes it."""
        self._processes[asyncio.get_running_loop()] = process

    async def aclose(self) -> None:
        """Give up the lease and close the connection of the running loop. A client that the application gave stays open."""
        process = self._processes.pop(asyncio.get_running_loop(), None)
        if process is not None:
            await process.aclose()
        if self._endpoint is not None:
            await self._endpoint.aclose()

    def close(self) -> None:
        """The same for synchronous use."""
        _engine_loop().call(self.aclose())

    # -- making effects durable -----------------------------------------------------------------------------------------------------------------

    @overload
    def tool(self, function: Callable[..., Any] | BaseTool, /) -> DurableTool: ...
    @overload
    def tool(
        self,
        /,
        *,
        on_unknown_outcome: OnUnknownOutcome | None = None,
        idempotent: bool = False,
        retry: RetryPolicy | None = None,
        **options: Any,
    ) -> Callable[[Callable[..., Any] | BaseTool], DurableTool]: ...

    def tool(
        self,
        function: Callable[..., Any] | BaseTool | None = None,
        /,
        *,
        on_unknown_outcome: OnUnknownOutcome | None = None,
        idempotent: bool = False,
        retry: RetryPolicy | None = None,
        **options: Any,
    ) -> Any:
        """Make a function or a LangChain tool durable: each call is recorded once and never executed again.

        Args:
            on_unknown_outcome: What to do when a process died inside the body: "rerun", "fail", or "suspend" (ask a person whether it happened).
                None means "rerun" for idempotent tools, "suspend" for others.
            idempotent: Running it twice does no harm.
            retry: Tries inside one call, before its outcome is recorded.
            options: For LangChain's `tool` decorator, when a function is given.
        """
        unknown: OnUnknownOutcome = on_unknown_outcome or ("rerun" if idempotent else "suspend")
        check_on_unknown_outcome(unknown)

        def wrap(target: Callable[..., Any] | BaseTool) -> DurableTool:
            if isinstance(target, DurableTool):
                return target
            inner: BaseTool = target if isinstance(target, BaseTool) else langchain_tool(**options)(target) if options else langchain_tool(target)
            if inner.name in self._tools:
                raise ConfigurationError(f"app {self.name!r} has a tool named {inner.name!r} already: give one of them another name")
            wrapped = durable_tool(inner, self.codec, Policy(on_unknown_outcome=unknown, retry=retry), self._tools.__contains__)
            self._tools[inner.name] = wrapped
            return wrapped

        return wrap if function is None else wrap(function)

    def get_tools(self) -> list[BaseTool]:
        """The app's durable tools, in the order in which they were made."""
        return list(self._tools.values())

    def llm(
        self,
        model: BaseChatModel,
        *,
        on_unknown_outcome: OnUnknownOutcome = "rerun",
        retry: RetryPolicy | None = None,
        name: str | None = None,
    ) -> DurableModel:
        """Make a chat model durable: each call is recorded once; a replay does not call the provider.

        Args:
            on_unknown_outcome: As for `tool`. "rerun" may pay for a call twice.
            retry: Tries inside one call (a provider's 429), before its outcome is recorded.
            name: What the history calls it; None takes the model's own name.
        """
        check_on_unknown_outcome(on_unknown_outcome)
        policy = Policy(on_unknown_outcome=on_unknown_outcome, retry=retry, is_start_awaited=on_unknown_outcome != "rerun")
        return durable_model(model, self.codec, policy, name)

    @overload
    def activity(self, function: Callable[P, T], /) -> Callable[P, T]: ...
    @overload
    def activity(
        self,
        /,
        *,
        on_unknown_outcome: OnUnknownOutcome | None = None,
        idempotent: bool = False,
        transactional: bool = False,
        retry: RetryPolicy | None = None,
        name: str | None = None,
    ) -> Callable[[Callable[..., T]], Callable[..., T]]: ...

    def activity(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        on_unknown_outcome: OnUnknownOutcome | None = None,
        idempotent: bool = False,
        transactional: bool = False,
        retry: RetryPolicy | None = None,
        name: str | None = None,
    ) -> Any:
        """Make any other effect of a node durable.

        An async function stays one. A synchronous function is called as before in a synchronous node; in an async node its call is awaited, and
        runs in a thread. Arguments and result have to be JSON-safe, messages, or of registered types. An activity cannot interrupt; a tool or a
        node can.

        Args:
            on_unknown_outcome, idempotent, retry: As for `tool`.
            transactional: The function is async and gets a keyword `session`, the driver's: what it writes with it to this cluster commits in one
                transaction with its outcome, exactly once, also when the process dies between any two instructions. It may be run more than once.
            name: What the history calls it; None takes the function's name.
        """
        if transactional and (retry is not None or on_unknown_outcome is not None):
            raise ConfigurationError("a transactional activity is repeated by its transaction and its outcome is never unknown: leave policies out")
        unknown: OnUnknownOutcome = on_unknown_outcome or ("rerun" if idempotent or transactional else "suspend")
        check_on_unknown_outcome(unknown)
        policy = Policy(on_unknown_outcome=unknown, is_transactional=transactional, retry=retry)

        def wrap(target: Callable[..., Any]) -> Callable[..., Any]:
            return durable_function(target, name or target.__name__, policy, self.codec, self._plain_transaction)

        return wrap if function is None else wrap(function)

    async def _plain_transaction(self, body: Callable[[Any], Awaitable[Any]]) -> Any:
        connection = self.process().connection
        await schema.check(connection)
        return await connection.transaction(body)

    def tool_node(self, tools: Sequence[BaseTool | Callable[..., Any]] | None = None, **options: Any) -> RunnableLambda[Any, Any]:
        """A ToolNode whose calls interrupt and resume each on its own; None takes all tools of the app."""
        return tool_nodes.tool_node(self.get_tools() if tools is None else tools, **options)

    async def gather(self, *functions: Callable[[], Awaitable[Any]]) -> list[Any]:
        """Run functions without arguments at once in a body, each as a branch whose effects and interrupts are its own."""
        return await tool_nodes.gather(self.codec, functions)

    def sleep(self, *, seconds: float | timedelta | None = None, until: datetime | None = None) -> Any:
        """Wait in a node, durably: `await app.sleep(seconds=3600)`, or without `await` in a synchronous node.

        For a long wait the run is given back: no process, thread or coroutine holds it, and whoever is there when the time has come goes on with it.
        It fires once, also when processes die. What was recorded first stands: a replay does not wait again, whatever time the code computes then.
        A timer beside an open question goes on when the question is answered. Not inside tools and activities.

        Args:
            seconds: From now, by the server's clock.
            until: A point in time, with a time zone.

        Raises:
            ConfigurationError: Neither, or both, or no time zone.
        """
        return timers.sleep(seconds=seconds, until=until)

    @overload
    def interrupt_type(
        self, name: str, *, payload: type[M], response: Any = None, expires_in: timedelta | None = None, default: Any = UNANSWERED
    ) -> type[M]: ...
    @overload
    def interrupt_type(
        self, name: str, *, response: Any = None, expires_in: timedelta | None = None, default: Any = UNANSWERED
    ) -> Callable[[type[M]], type[M]]: ...

    def interrupt_type(
        self, name: str, *, payload: Any = None, response: Any = None, expires_in: timedelta | None = None, default: Any = UNANSWERED
    ) -> Any:
        """Register a type of questions: what one carries, what its answers are made into. Then `app.interrupt(name, payload)` asks.

        A decorator of the payload model, or a call with `payload=`, or without any for questions that carry anything.

        Args:
            payload: Model of the question's value: a Pydantic model, a dataclass or a TypedDict. It is stored as its JSON.
            response: Model of the answer; also a union of models. Answers are checked against its JSON Schema before they are stored, and against
                the model itself where this app resumes the run.
            expires_in: How long a question waits that says nothing else. See `interrupt`.
            default: The answer that it then gets: JSON, or an instance of the response model.

        Returns:
            The payload model; without one, the decorator.

        Raises:
            ConfigurationError: No model, a default that does not fit, or the name is registered with other models.
        """

        def register(model: Any) -> Any:
            self.interrupt_types.register(name, model, response, expires_in, default)
            return model

        register(payload)
        return register if payload is None else payload

    def interrupt(
        self,
        name: str,
        value: Any = None,
        *,
        response_schema: Any = None,
        expires_in: timedelta | None = None,
        default: Any = UNANSWERED,
        audience: str | None = None,
        escalate_in: timedelta | None = None,
        escalate_to: str | None = None,
    ) -> Any:
        """Ask a person, from a node or a tool: LangGraph's `interrupt` with a name, and with what happens if nobody answers.

        Args:
            name: What people see the question listed under; that of a registered type makes it one of these (`interrupt_type`).
            value: The question: of a registered type, its payload model or what that is made from.
            response_schema: JSON Schema, or a type that Pydantic knows: other answers are refused. A registered type has its own.
            expires_in: How long the question waits. Then the run goes on with `default`; without one, InterruptExpired is raised here. Other
                questions that were asked together with it are asked again, and keep their deadlines. None: as its registered type says, or for ever.
            default: The answer that it then gets; where none is given, that of its registered type, if it has one.
            audience: Who is asked, in words of the application, such as "managers": what lists can be filtered by and an `authorize` hook is told.
            escalate_in, escalate_to: After this time this audience is asked as well.

        Returns:
            The answer: of a registered type, an instance of its response model; else as it was given.

        Raises:
            InterruptExpired: Nobody answered in time, and there is no default.
            ConfigurationError: A value that does not fit its model, a default without a deadline, or one that does not fit the schema; an escalation
                without an audience.
            pydantic.ValidationError: The answer fits the JSON Schema, and the response model refuses it. Let it pass: the run fails, with
                UnusableAnswer.
        """
        asked = questions.audience_of(name, audience, escalate_in, escalate_to)
        known = self.interrupt_types.get(name)
        if known is not None:
            if response_schema is not None:
                raise ConfigurationError(f"the interrupt type {name!r} says how its answers look: give response= to interrupt_type instead")
            return known.ask(value, expires_in, default, asked)
        return questions.ask(name, value, response_schema, expires_in, default, audience=asked)

    def middleware(self, *, idempotent_tools: Collection[str] = ()) -> AgentMiddleware[Any, Any, Any]:
        """Make an existing `create_agent(model, tools, middleware=[app.middleware(), …])` durable, with its plain model and tools.

        What is both wrapped and under the middleware is recorded once. Put it first in the list.

        Args:
            idempotent_tools: Names of tools that may run twice; for the others a person is asked when a process died inside one.

        Raises:
            ConfigurationError: The package `langchain` is not installed.
        """
        try:
            from mongo_durable.langgraph.middleware import DurableMiddleware
        except ModuleNotFoundError as error:
            raise ConfigurationError("app.middleware() is for LangChain's create_agent: install the package langchain") from error

        def make_tool(tool: BaseTool) -> DurableTool:
            policy = Policy(on_unknown_outcome="rerun" if tool.name in idempotent_tools else "suspend")
            return durable_tool(tool, self.codec, policy, lambda _: True)

        return DurableMiddleware(self.codec, Policy(on_unknown_outcome="rerun", is_start_awaited=False), make_tool)

    def deep_agent(
        self,
        model: str | BaseChatModel | None = None,
        tools: Sequence[BaseTool | Callable[..., Any] | dict[str, Any]] | None = None,
        *,
        system_prompt: Any = None,
        middleware: Sequence[AgentMiddleware[Any, Any, Any]] = (),
        subagents: Sequence[Any] | None = None,
        skills: list[str] | None = None,
        memory: list[str] | None = None,
        permissions: list[Any] | None = None,
        backend: Any = None,
        interrupt_on: dict[str, Any] | None = None,
        response_format: Any = None,
        state_schema: type | None = None,
        context_schema: type | None = None,
        checkpointer: Any = None,
        store: Any = None,
        debug: bool = False,
        name: str | None = None,
        cache: Any = None,
    ) -> Any:
        """A durable deep agent: `create_deep_agent` of the package deepagents, with its own arguments, for `@app.entrypoint`.

        Models and tools may be given plainly; what is wrapped already is not wrapped twice. Sub-agents stand at `agent/1/<type>/<ordinal>`.

        Returns:
            A compiled graph, which may also be a node of another graph of the app.

        Raises:
            ConfigurationError: The extra is not installed, or a part is given in a way that cannot be made durable.
            UnsupportedGraph: A sub-agent or middleware cannot be made durable.
        """
        try:
            from mongo_durable.langgraph.deep_agents.building import build
        except ModuleNotFoundError as error:
            if not str(error.name).startswith(("deepagents", "langchain")):
                raise
            raise ConfigurationError("app.deep_agent needs the package deepagents: install mongo_durable[deepagents]") from error
        options = {
            "tools": tools,
            "system_prompt": system_prompt,
            "skills": skills,
            "memory": memory,
            "permissions": permissions,
            "interrupt_on": interrupt_on,
            "context_schema": context_schema,
            "checkpointer": checkpointer,
            "store": store,
            "debug": debug,
            "name": name,
            "cache": cache,
        }
        parts = {
            "model": model,
            "middleware": middleware,
            "subagents": subagents,
            "backend": backend,
            "response_format": response_format,
            "state_schema": state_schema,
        }
        return build(self, **parts, **options)

    def checkpointer(self) -> DurableCheckpointer:
        """What a graph of this app may be compiled with. The driver puts its own scratch in its place for each attempt."""
        return DurableCheckpointer()

    # -- the graph ------------------------------------------------------------------------------------------------------------------------------

    def entrypoint(self, build: Callable[[], Any]) -> Callable[[], Any]:
        """Name the function that builds the graph: a StateGraph or a compiled graph. It is called once a process."""
        if self._build is not None:
            raise ConfigurationError(f"app {self.name!r} has an entrypoint already")
        self._build = build
        return build

    def graph(self) -> Any:
        """The compiled graph, checked.

        Raises:
            UnsupportedGraph: It has a shape that cannot be made durable.
        """
        if self._graph is None:
            if self._build is None:
                raise ConfigurationError(f"app {self.name!r} has no graph: decorate the function that builds it with @app.entrypoint")
            built = self._build()
            checked = check_graph(built.compile() if isinstance(built, StateGraph) else built)
            self._graph = with_answers_checked(with_stable_ids(self._with_durable_hooks(checked)))
            drawn = self._graph.get_graph()
            edges = sorted(f"{edge.source}>{edge.target}" for edge in drawn.edges)
            self.topology = digest([[*sorted(drawn.nodes)], [*edges]])[:12]
        return self._graph

    def _with_durable_hooks(self, graph: Any) -> Any:
        if "langchain.agents" not in sys.modules:
            return graph  # nobody has made an agent
        from mongo_durable.langgraph.middleware import with_durable_hooks

        return with_durable_hooks(graph, self.llm)

    @property
    def code_version(self) -> str:
        """Name, version and shape of the graph that this process has, recorded with each attempt."""
        self.graph()
        return f"{self.name}:{self.version}:{self.topology}"

    # -- LangGraph's own shape ------------------------------------------------------------------------------------------------------------------

    async def ainvoke(
        self,
        input: Any,
        config: RunnableConfig | None = None,
        *,
        context: Any = None,
        run_id: str | None = None,
        when_busy: WhenBusy = "refuse",
        **options: Any,
    ) -> Any:
        """Run the graph durably, from a new input or from answers, to its end or to its next interrupt.

        Args:
            input: The graph's input; `Command(resume={activity_id: answer})` answers the open frontier of the thread's run (a bare value does if it
                has one question); None goes on with the thread's live run.
            config: LangGraph's; `configurable.thread_id` names the thread. JSON-safe values in `configurable` are stored with the run.
            context: The graph's context, JSON-safe or of a registered type; stored with the run.
            run_id: Name of the new run; the same name again is the same run.
            when_busy: What to do while another run is live on the thread: "refuse" this one, or "queue" it and wait for its turn.

        Returns:
            The graph's output; with `__interrupt__`, whose ids are stable activity ids, if the run is suspended.

        Raises:
            ThreadBusy: Another run is live on the thread.
            DurableError: See `mongo_durable.errors`.
            Exception: What the graph raised; the run has failed.
        """
        return await self._executor.follow(await self._executor.open(input, config, context, run_id, options, when_busy=when_busy))

    def invoke(
        self,
        input: Any,
        config: RunnableConfig | None = None,
        *,
        context: Any = None,
        run_id: str | None = None,
        when_busy: WhenBusy = "refuse",
        **options: Any,
    ) -> Any:
        """The same for a synchronous caller. The graph runs in this thread."""
        engine = _engine_loop()
        work = engine.call(self._executor.open(input, config, context, run_id, options, when_busy=when_busy))
        while isinstance(work, Work):
            try:
                # In a context of its own, as `ainvoke` has a task of its own: afterwards this thread is outside any attempt.
                reached = contextvars.copy_context().run(work.driver.run)
            except BaseException as error:  # noqa: BLE001 - raised again, after the run has got the end that it means
                raise engine.call(self._executor.conclude(work.attempt, error)) from None
            finally:
                work.process.running.pop(work.attempt.run_id, None)
            if not isinstance(reached, Asleep):
                return reached.output
            work = engine.call(self._executor.after_sleep(work))
        return work

    async def astream(
        self,
        input: Any,
        config: RunnableConfig | None = None,
        *,
        stream_mode: str | Sequence[str] = "values",
        subgraphs: bool = False,
        replay: Replay = "skip",
        context: Any = None,
        run_id: str | None = None,
        **options: Any,
    ) -> AsyncIterator[Any]:
        """`ainvoke`, as a stream: one generator to the end of the run or to its next interrupt, which appears with its stable id.

        Args:
            stream_mode: One or several of values, updates, messages, custom, tasks.
            subgraphs: Chunks of child graphs too, with their namespace.
            replay: "skip" leaves out what an earlier attempt streamed; "emit" streams replayed steps again.

        Raises:
            As `ainvoke`.
        """
        request = StreamRequest.of(stream_mode, subgraphs, replay)
        work = await self._executor.open(input, config, context, run_id, options, request)
        if not isinstance(work, Work):
            for chunk in request.of_result(work):
                yield chunk
            return
        chunks: asyncio.Queue[Any] = asyncio.Queue()
        running = asyncio.create_task(self._executor.follow(work, chunks.put_nowait))
        running.add_done_callback(lambda _: chunks.put_nowait(_END))
        try:
            while (chunk := await chunks.get()) is not _END:
                yield chunk
            await running
        finally:
            # The caller has closed the generator early: the attempt is given back, and the run can go on elsewhere.
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def stream(
        self,
        input: Any,
        config: RunnableConfig | None = None,
        *,
        stream_mode: str | Sequence[str] = "values",
        subgraphs: bool = False,
        replay: Replay = "skip",
        context: Any = None,
        run_id: str | None = None,
        **options: Any,
    ) -> Iterator[Any]:
        """`astream` for a synchronous caller. The graph runs in this thread."""
        request = StreamRequest.of(stream_mode, subgraphs, replay)
        if (config or {}).get("max_concurrency") == 1:
            # LangGraph's sync stream hangs then: its waiter takes the only worker (seen on 1.2.24).
            raise UnsupportedGraph("a synchronous stream cannot run with max_concurrency=1: raise it, or use astream or invoke")
        engine = _engine_loop()
        work = engine.call(self._executor.open(input, config, context, run_id, options, request))
        while isinstance(work, Work):
            own_context = contextvars.copy_context()
            steps = work.driver.stream()
            try:
                while True:
                    try:
                        chunk = own_context.run(next, steps)
                    except StopIteration as stopped:
                        reached = stopped.value
                        break
                    yield chunk
            except BaseException as error:  # noqa: BLE001 - raised again, after the run has got the end that it means
                raise engine.call(self._executor.conclude(work.attempt, error)) from None
            finally:
                work.process.running.pop(work.attempt.run_id, None)
            if not isinstance(reached, Asleep):
                return
            work = engine.call(self._executor.after_sleep(work))
        yield from request.of_result(work)

    async def aget_state(self, config: RunnableConfig) -> Any:
        """The thread's last committed state, for people who look, as LangGraph's StateSnapshot.

        While a run of the thread is suspended, `interrupts` has its questions with their stable ids; what the run has done since is in its history.
        """
        thread_id = config.get("configurable", {}).get("thread_id")
        if thread_id is None:
            raise ConfigurationError("config needs configurable.thread_id")
        connection = self.process().connection
        await schema.prepare(connection)
        saver = InMemorySaver()
        state = await runs.thread_state(connection, str(thread_id), await runs.committed_turn(connection, str(thread_id)))
        if state is not None:
            seed(saver, str(thread_id), state, self.codec)
        snapshot = await self.graph().copy({"checkpointer": saver}).aget_state(root_config(str(thread_id)))
        waiting = await frontiers.open_frontiers(connection, thread_id=str(thread_id))
        return snapshot._replace(interrupts=tuple(each for frontier in waiting for each in public_interrupts(self.codec, frontier)))

    def get_state(self, config: RunnableConfig) -> Any:
        """`aget_state` for a synchronous caller."""
        return _engine_loop().call(self.aget_state(config))

    async def execute(self, process: Process, claimed: Claim) -> str:
        """Run one attempt of a claimed run to its rest; for a runner. See `Executor.execute`."""
        return await self._executor.execute(process, claimed)


_END: Any = object()
