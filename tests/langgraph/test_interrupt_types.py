"""Typed questions: payload and answer are models, whoever answers, wherever the question is asked."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any, Literal
from uuid import UUID

import pymongo
import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt
from pydantic import BaseModel, ConfigDict, Discriminator, Field, RootModel, Tag, TypeAdapter, ValidationError, field_validator
from typing_extensions import TypedDict

from mongo_durable import App
from mongo_durable.engine import resolving
from mongo_durable.errors import ConfigurationError, InterruptExpired, InvalidAnswer, UnsupportedGraph, UnusableAnswer
from mongo_durable.protocol.events import EventType, RunStatus
from mongo_durable.store import events, frontiers, heads, runs
from mongo_durable.store.documents import StoredFrontier
from tests.langgraph.bench import Bench, Colour
from tests.langgraph.kit import Kit, Ledger, State, calls

COLOURS: tuple[Colour, ...] = ("async", "sync", "thread")
PLACES = ("node", "tool", "tool node", "agent", "child", "agent in a tool")


class Approval(BaseModel):
    """What is to be approved."""

    item: str
    price: Decimal
    due: date


class ApprovalResponse(BaseModel):
    """How an approval has to look; that it stays below a limit is more than a JSON Schema can say."""

    approved: bool
    limit: int = 0
    at: datetime

    @field_validator("limit")
    @classmethod
    def _is_below(cls, limit: int) -> int:
        if limit > 100:
            raise ValueError("above what anybody may approve")
        return limit


PAYLOAD = {"item": "desk", "price": "12.50", "due": "2030-01-31"}
ANSWER = {"approved": True, "limit": 5, "at": "2030-01-01T10:00:00Z"}
READ = ApprovalResponse(approved=True, limit=5, at=datetime(2030, 1, 1, 10, tzinfo=UTC))
TOO_MUCH = {**ANSWER, "limit": 101}


class Asking:
    """A run whose code asks for an approval in a place, and then asks something else in a node."""

    def __init__(self, bench: Bench, place: str, colour: Colour, ask: Callable[[App], Any] | None = None) -> None:
        self.bench, self.place, self.colour = bench, place, colour
        self.heard: list[Any] = []
        self.ledger = Ledger()
        self.run_id = bench.new_run()
        self.ask = ask or (lambda app: app.interrupt("approval_required", Approval(item="desk", price=Decimal("12.50"), due=date(2030, 1, 31))))
        self.app = self.built()

    def built(self, response: Any = ApprovalResponse, **options: Any) -> App:
        """An app that knows the type."""
        self.app = self.bench.built(self._make, self.ledger, self.colour)
        self.app.interrupt_type("approval_required", payload=Approval, response=response, **options)
        return self.app

    def _make(self, kit: Kit) -> Any:
        async def hear() -> None:
            self.ledger.note("BODY", "hear", "")
            self.heard.append(self.ask(self.app))

        async def approve(q: str) -> str:
            """Ask for an approval."""
            await hear()
            return "asked"

        async def node(state: State) -> State:
            if self.place == "node":
                await hear()
            elif self.place == "tool":
                await kit.call(tool, {"q": "now"})
            else:
                await kit.call(inner, {"messages": [("user", "go")]} if self.place != "child" else {"lines": []})
            return {"lines": ["asked"]}

        async def asking_child(state: State) -> State:
            await hear()
            return {}

        async def last(state: State) -> State:
            return {"lines": [kit.interrupt("and now?")]}

        tool = kit.tool(approve)
        inner: Any = None
        if self.place == "child":
            child = StateGraph(State)
            child.add_node("asking", kit.body(asking_child))
            child.add_edge(START, "asking")
            inner = child.compile()
        elif self.place == "tool node":
            inner_graph: Any = StateGraph(_Messages)
            inner_graph.add_node("tools", kit.app.tool_node([tool]))
            inner_graph.add_node("model", lambda _: {"messages": [calls("approve")]})
            inner_graph.add_edge(START, "model")
            inner_graph.add_edge("model", "tools")
            inner = inner_graph.compile()
        elif self.place in ("agent", "agent in a tool"):
            agent = create_agent(kit.model(calls("approve"), AIMessage("done")), [tool])
            inner = agent
            if self.place == "agent in a tool":
                delegate = kit.delegate(agent)
                inner = create_agent(kit.model(calls("delegate"), AIMessage("done")), [delegate])
        graph = StateGraph(State)
        graph.add_node("node", kit.body(node))
        graph.add_node("last", kit.body(last))
        graph.add_edge(START, "node")
        graph.add_edge("node", "last")
        return graph

    def go_on(self, given: Any = None) -> Any:
        """One call of the app."""
        config = {"configurable": {"thread_id": self.run_id}}
        return self.bench.once(self.app, self.colour, {"lines": []} if given is None else given, config, run_id=self.run_id)

    @property
    def frontier(self) -> StoredFrontier:
        """The run's newest frontier."""
        found: StoredFrontier = self.bench.call(frontiers.current(self.bench.process.connection, self.run_id))
        return found

    def resolve(self, answer: Any) -> None:
        """Answer from elsewhere, where only the JSON Schema is known."""
        answers = {self.frontier.entries[0].activity_id: answer}
        self.bench.call(resolving.resolve(self.bench.process.connection, self.run_id, answers))

    @property
    def status(self) -> RunStatus:
        """The run's status."""
        status: RunStatus = self.bench.call(heads.get(self.bench.process.connection, self.run_id)).status
        return status

    @property
    def event_types(self) -> list[EventType]:
        """What the history has."""
        return [each.type for each in self.bench.call(events.read_history(self.bench.process.connection, self.run_id))]

    def retry(self) -> None:
        """As an operator does."""
        self.bench.call(runs.retry(self.bench.process.connection, self.run_id))


class _Messages(TypedDict, total=False):
    messages: list[Any]


@pytest.mark.parametrize(("place", "colour"), [*zip(PLACES, COLOURS * 2, strict=True), ("tool", "sync")])
def test_the_code_hears_the_model(bench: Bench, place: str, colour: Colour) -> None:
    """The question is stored as the JSON of its payload with the schema of its answer; each execution and attempt hears an equal model."""
    asking = Asking(bench, place, colour)
    (asked,) = asking.go_on()["__interrupt__"]
    assert (asked.value, asked.response_schema) == (PAYLOAD, TypeAdapter(ApprovalResponse).json_schema())
    with pymongo.MongoClient(bench.uri) as client:
        (stored,) = client[bench.database].frontiers.find_one({"run_id": asking.run_id})["entries"]
    assert (stored["name"], stored["value"]) == ("approval_required", PAYLOAD)
    asking.built()
    (other,) = asking.go_on(Command(resume={asked.id: ANSWER}))["__interrupt__"]
    asking.built()
    assert asking.go_on(Command(resume={other.id: "well"}))["lines"] == ["asked", "well"]
    assert asking.status is RunStatus.COMPLETED
    assert len(asking.heard) >= (1 if "tool" in place or place == "agent" else 2), "a recorded tool is not entered again"
    assert all(type(each) is ApprovalResponse and each == READ for each in asking.heard)


@pytest.mark.parametrize(("place", "colour"), [("node", "async"), ("tool", "sync"), ("agent", "thread")])
def test_the_app_refuses_what_the_model_refuses(bench: Bench, place: str, colour: Colour) -> None:
    """An answer through the app that only the model refuses is refused with its fields; nothing is stored, no node runs; another goes on."""
    asking = Asking(bench, place, colour)
    (asked,) = asking.go_on()["__interrupt__"]
    before, bodies = asking.event_types, asking.ledger.ran.total()
    for answer in ({asked.id: TOO_MUCH}, TOO_MUCH):
        with pytest.raises(InvalidAnswer, match=rf"{asked.id}.*approval_required.*\$\.limit") as refused:
            asking.go_on(Command(resume=answer))
        assert refused.value.errors == ["$.limit: Value error, above what anybody may approve"]
    with pytest.raises(InvalidAnswer, match=r"\$\.approved, \$\.at"):
        asking.go_on(Command(resume={"approved": "perhaps", "at": "tomorrow"}))
    with pytest.raises(InvalidAnswer) as refused:
        asking.go_on(Command(resume={"approved": object()}))
    assert refused.value.errors == ["$: the answer is not JSON"]
    assert (asking.event_types, asking.ledger.ran.total(), asking.status) == (before, bodies, RunStatus.SUSPENDED)
    assert asking.go_on(Command(resume=READ))["__interrupt__"], "an instance of the model is an answer too"
    assert asking.heard == [READ]


@pytest.mark.parametrize("answer", [{"approved": True}, {"approved": True, "at": "tomorrow"}, "yes", {**ANSWER, "limit": 1.5}])
def test_everybody_refuses_what_the_schema_refuses(bench: Bench, answer: Any) -> None:
    """Where the model is not known its JSON Schema refuses, formats included, before anything is stored."""
    asking = Asking(bench, "node", "async")
    asking.go_on()
    with pytest.raises(InvalidAnswer) as refused:
        asking.resolve(answer)
    assert refused.value.errors
    assert asking.status is RunStatus.SUSPENDED


@pytest.mark.parametrize(("place", "colour"), [*zip(PLACES, COLOURS[::-1] * 2, strict=True), ("tool", "async")])
def test_an_answer_that_only_the_code_refuses(bench: Bench, place: str, colour: Colour) -> None:
    """The run fails naming question and fields; no effect fails of it; with code that takes the answer, `retry` goes on."""
    asking = Asking(bench, place, colour)
    (asked,) = asking.go_on()["__interrupt__"]
    asking.resolve(TOO_MUCH)
    asking.built()
    with pytest.raises(UnusableAnswer, match=rf"{asked.id}.*approval_required.*\$\.limit") as refused:
        asking.go_on()
    assert (refused.value.activity_id, refused.value.name) == (asked.id, "approval_required")
    assert refused.value.errors == ["$.limit: Value error, above what anybody may approve"]
    head = bench.call(heads.get(bench.process.connection, asking.run_id))
    assert head.status is RunStatus.FAILED
    assert head.error["type"].endswith("UnusableAnswer")
    assert EventType.ACTIVITY_FAILED not in asking.event_types
    assert not asking.heard

    class Generous(BaseModel):
        approved: bool
        limit: int = 0
        at: datetime

    asking.retry()
    asking.built(Generous)
    (other,) = asking.go_on()["__interrupt__"]
    assert other.value == "and now?"
    assert asking.heard[-1] == Generous.model_validate(TOO_MUCH)


@pytest.mark.parametrize(
    ("place", "how"),
    [("node", "except"), ("node", "asked again"), ("tool", "except"), ("tool", "asked again"), ("tool", "handle_validation_error")],
)
def test_a_refused_answer_cannot_be_swallowed(bench: Bench, place: str, how: str) -> None:
    """A body that goes on without the answer, or asks again, ends the run too, and a tool has no outcome of it."""

    def ask(app: App) -> Any:
        try:
            return app.interrupt("approval_required", PAYLOAD)
        except ValidationError:
            if how == "handle_validation_error":
                raise
            return "nobody" if how == "except" else app.interrupt("approval_required", PAYLOAD)

    asking = Asking(bench, place, "async", ask)
    if how == "handle_validation_error":
        next(each for each in asking.app.get_tools() if each.name == "approve").inner.handle_validation_error = True
    asking.go_on()
    asking.resolve(TOO_MUCH)
    with pytest.raises(UnsupportedGraph, match="did not reach the code"):
        asking.go_on()
    assert asking.status is RunStatus.FAILED
    assert not {EventType.ACTIVITY_COMPLETED, EventType.ACTIVITY_FAILED} & set(asking.event_types)


def test_a_sibling_keeps_its_outcome(bench: Bench) -> None:
    """What runs beside a refused answer is recorded: after a retry it is not executed again."""
    asking = Asking(bench, "node", "async")
    asking.app = app = bench.app("beside")
    app.interrupt_type("approval_required", payload=Approval, response=ApprovalResponse)
    kit = Kit(app, asking.ledger, is_sync=False, pause_s=0.05)

    async def asks(state: State) -> State:
        app.interrupt("approval_required", PAYLOAD)
        return {}

    async def works(state: State) -> State:
        first = interrupt("go?")
        return {"lines": [first, await kit.act("beside"), await kit.act("beside too")]}

    @app.entrypoint
    def build() -> StateGraph[Any]:
        graph = StateGraph(State)
        for node in (asks, works):
            graph.add_node(node.__name__, node)
            graph.add_edge(START, node.__name__)
        return graph

    asked = asking.go_on()["__interrupt__"]
    bench.call(resolving.resolve(bench.process.connection, asking.run_id, {each.id: "go" if each.value == "go?" else TOO_MUCH for each in asked}))
    with pytest.raises(UnusableAnswer):
        asking.go_on()
    asking.retry()
    with pytest.raises(UnusableAnswer):
        asking.go_on()
    assert {count for count in asking.ledger.of("act").values()} == {1}


# -- deadlines and defaults -------------------------------------------------------------------------------------------------------------------------

SOON = timedelta(milliseconds=30)
LATER = timedelta(hours=1)


@pytest.mark.parametrize("default", [ANSWER, READ], ids=["json", "instance"])
@pytest.mark.parametrize("place", ["node", "tool"])
def test_a_default_is_heard_as_the_model(bench: Bench, place: str, default: Any) -> None:
    """The type says how long its questions wait and what they then hear."""
    asking = Asking(bench, place, "async")
    asking.built(expires_in=SOON, default=default)
    out = asking.go_on()
    (entry,) = asking.frontier.entries
    assert (entry.expires_in or entry.expires_at, entry.default) != (None, None)
    assert entry.default == ANSWER
    while out["__interrupt__"][0].value != "and now?":
        out = asking.go_on()
    assert asking.heard
    assert all(each == READ for each in asking.heard)


def test_a_question_says_otherwise_than_its_type(bench: Bench) -> None:
    """Deadline and default of a call go before those of the type; a default of the type needs a deadline from somewhere."""
    other = {**ANSWER, "limit": 7}
    asking = Asking(bench, "node", "async", lambda app: app.interrupt("approval_required", PAYLOAD, expires_in=LATER, default=other))
    asking.built(expires_in=SOON, default=ANSWER)
    asking.go_on()
    (entry,) = asking.frontier.entries
    assert entry.expires_at is not None
    assert (entry.expires_at - asking.frontier.opened_at, entry.default) == (LATER, other)

    waiting = Asking(bench, "node", "async")
    waiting.built(default=ANSWER)
    waiting.go_on()
    assert waiting.frontier.entries[0].expires_at is None


def test_nobody_answers_a_typed_question(bench: Bench) -> None:
    """Without a default InterruptExpired is raised, which the code may handle."""

    def ask(app: App) -> Any:
        try:
            return app.interrupt("approval_required", PAYLOAD, expires_in=SOON)
        except InterruptExpired:
            return "nobody"

    asking = Asking(bench, "node", "async", ask)
    while asking.go_on()["__interrupt__"][0].value != "and now?":
        pass
    assert set(asking.heard) == {"nobody"}


# -- what can be registered, and asked ---------------------------------------------------------------------------------------------------------------


class Other(BaseModel):
    """Another model."""

    amount: int


class Unfinished(BaseModel):
    """A model that cannot be built."""

    then: NotThere  # noqa: F821 # type: ignore[name-defined]


class RustPattern(BaseModel):
    """A pattern that Pydantic's engine knows and JSON Schema's checkers do not."""

    name: str = Field(pattern=r"^\p{Lu}")


def test_a_payload_model_is_decorated() -> None:
    """The decorator returns the model; the same again changes nothing; a plain call does the same."""
    app = App("typed")

    @app.interrupt_type("approval", response=ApprovalResponse)
    class Payload(BaseModel):
        item: str

    assert app.interrupt_type("approval", response=ApprovalResponse)(Payload) is Payload
    assert app.interrupt_type("approval", payload=Payload, response=ApprovalResponse) is Payload
    app.interrupt_type("other", response=Other)
    with pytest.raises(ConfigurationError, match="item"):
        app.interrupt("approval", {})
    for models in (
        {"payload": Other, "response": ApprovalResponse},
        {"payload": Payload, "response": Other},
        {"payload": Payload},
        {"payload": Payload, "response": ApprovalResponse, "expires_in": LATER},
    ):
        with pytest.raises(ConfigurationError, match="registered already"):
            app.interrupt_type("approval", **models)
    with pytest.raises(ConfigurationError, match="give response= to interrupt_type"):
        app.interrupt("approval", {"item": "desk"}, response_schema={"type": "object"})


@pytest.mark.parametrize(
    "options",
    [
        {"payload": dict},
        {"payload": "Approval"},
        {"response": int},
        {"response": Other(amount=1)},
        {"response": list[Other]},
        {"response": Other | str},
        {"response": Unfinished},
        {"response": RustPattern},
        {"response": Other, "default": {"amount": "many"}},
        {"response": ApprovalResponse, "default": TOO_MUCH},
        {"response": ApprovalResponse, "default": object()},
        {"response": Other, "expires_in": timedelta()},
    ],
    ids=lambda options: "-".join(f"{name} {getattr(each, '__name__', type(each).__name__)}" for name, each in options.items()),
)
def test_what_is_no_type(options: dict[str, Any]) -> None:
    """What is no model, cannot be one, or has a default that does not fit is refused when it is registered."""
    with pytest.raises(ConfigurationError, match="'approval'"):
        App("typed").interrupt_type("approval", **options)
    with pytest.raises(ConfigurationError, match="name"):
        App("typed").interrupt_type("", **options)


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"item": "desk"}, r"\$\.price \(missing\), \$\.due \(missing\)"),
        ({**PAYLOAD, "price": "much"}, r"\$\.price \(decimal_parsing\)"),
        (Other(amount=1), r"\$ \(model_type\)"),
        (None, r"\$ \(model_type\)"),
        (Approval.model_construct(item="desk", price="much", due=[]), "as JSON"),
    ],
)
def test_a_wrong_payload_is_refused_where_it_is_asked(value: Any, where: str) -> None:
    """The error names the fields and not their values."""
    app = App("typed")
    app.interrupt_type("approval", payload=Approval)
    with pytest.raises(ConfigurationError, match=where) as refused:
        app.interrupt("approval", value)
    assert "much" not in str(refused.value)


def test_a_wrong_default_of_a_call() -> None:
    """It is refused where it is asked, as one of the type is where it is registered."""
    app = App("typed")
    app.interrupt_type("approval", response=ApprovalResponse)
    for default in (TOO_MUCH, {"approved": True}, object()):
        with pytest.raises(ConfigurationError, match="default"):
            app.interrupt("approval", expires_in=LATER, default=default)
    with pytest.raises(ConfigurationError, match="no deadline"):
        app.interrupt("approval", default=ANSWER)


@pytest.mark.parametrize("is_async", [True, False])
async def test_in_plain_langgraph(is_async: bool) -> None:
    """Outside a durable run the same code hears the same model, and a refused answer leaves the interrupt open."""
    app = App("typed")
    app.interrupt_type("approval", payload=Approval, response=ApprovalResponse)
    heard: list[Any] = []

    def node(state: State) -> State:
        heard.append(app.interrupt("approval", PAYLOAD))
        return {}

    graph = StateGraph(State)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    compiled = graph.compile(checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "t"}}

    async def go_on(given: Any) -> Any:
        return await compiled.ainvoke(given, config) if is_async else compiled.invoke(given, config)

    (asked,) = (await go_on({"lines": []}))["__interrupt__"]
    assert (asked.value, asked.response_schema) == (PAYLOAD, TypeAdapter(ApprovalResponse).json_schema())
    with pytest.raises(ValidationError):
        await go_on(Command(resume=TOO_MUCH))
    await go_on(Command(resume=ANSWER))
    assert heard == [READ]


# -- what models can be ------------------------------------------------------------------------------------------------------------------------------


class Size(enum.Enum):
    """An enum."""

    SMALL = "s"
    LARGE = "l"


class Inner(BaseModel):
    """Referred to."""

    size: Size | None = None


class Outer(BaseModel):
    """References, also to itself."""

    inner: Inner
    children: list[Outer] = []


class Strict(BaseModel):
    """Texts for times and ids are what JSON has, also for a strict model."""

    model_config = ConfigDict(strict=True)

    when: datetime
    key: UUID
    price: Decimal
    tags: tuple[int, str]
    count: int


class Aliased(BaseModel):
    """Goes by another name."""

    order_id: int = Field(alias="orderId")
    note: str = Field(default="", validation_alias="remark", serialization_alias="remarkOut")


class Cat(BaseModel):
    """Told apart by a field."""

    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    """Told apart by a field."""

    kind: Literal["dog"]
    name: str


class Short(BaseModel):
    """Told apart by a function; it fits where the other does."""

    text: str


class Long(BaseModel):
    """Told apart by a function."""

    text: str
    more: str = ""


class Form(TypedDict):
    """A TypedDict."""

    due: date


@dataclasses.dataclass
class Point:
    """A dataclass."""

    x: float
    label: str | None = None


KEY = "12345678-1234-5678-1234-567812345678"
BY_LENGTH = Annotated[
    Annotated[Short, Tag("short")] | Annotated[Long, Tag("long")],
    Discriminator(lambda value: "long" if "more" in value else "short"),
]


@pytest.mark.parametrize(
    ("response", "answer", "heard", "refused"),
    [
        (
            Outer,
            {"inner": {"size": "s"}, "children": [{"inner": {}}]},
            Outer(inner=Inner(size=Size.SMALL), children=[Outer(inner=Inner())]),
            {"inner": {"size": "m"}},
        ),
        (
            Strict,
            {"when": "2030-01-01T10:00:00", "key": KEY, "price": "1.10", "tags": [1, "a"], "count": 3},
            Strict(when=datetime(2030, 1, 1, 10), key=UUID(KEY), price=Decimal("1.10"), tags=(1, "a"), count=3),  # noqa: DTZ001 - as answered
            {"when": "2030-01-01T10:00:00", "key": "no", "price": "1.10", "tags": [1, "a"], "count": 3},
        ),
        (Aliased, {"orderId": 7, "remark": "soon"}, Aliased(orderId=7, remark="soon"), {"order_id": 7}),
        (Annotated[Cat | Dog, Field(discriminator="kind")], {"kind": "dog", "name": "Rex"}, Dog(kind="dog", name="Rex"), {"kind": "dog", "lives": 9}),
        (BY_LENGTH, {"text": "hello"}, Short(text="hello"), {"more": "only"}),
        (Cat | None, None, None, {}),
        (RootModel[list[int]], [1, 2], RootModel[list[int]]([1, 2]), {"root": [1, 2]}),
        (RootModel[bool], False, RootModel[bool](False), None),
        (Form, {"due": "2030-01-31"}, {"due": date(2030, 1, 31)}, {"due": "soon"}),
        (Point, {"x": 1.5}, Point(1.5), {"x": "far"}),
    ],
    ids=["references", "strict", "aliases", "discriminator", "function", "optional", "root", "falsy", "typed dict", "dataclass"],
)
def test_models_of_answers(bench: Bench, response: Any, answer: Any, heard: Any, refused: Any) -> None:
    """What Pydantic can say of JSON: the schema takes what the model reads, whoever answers, and refuses what it does not."""
    asking = Asking(bench, "node", "async", lambda app: app.interrupt("any"))
    asking.app.interrupt_type("any", response=response)
    asking.go_on()
    for answered in (asking.resolve, lambda given: asking.go_on(Command(resume={asking.frontier.entries[0].activity_id: given}))):
        with pytest.raises(InvalidAnswer):
            answered(refused)
    asking.resolve(answer)
    asking.go_on()
    assert asking.heard
    assert all(each == heard and type(each) is type(heard) for each in asking.heard)


@pytest.mark.parametrize("model", [Aliased, Point, Form])
def test_models_of_payloads(bench: Bench, model: Any) -> None:
    """A payload is stored under the names that its JSON has."""
    value, stored = {
        Aliased: ({"orderId": 7}, {"orderId": 7, "remarkOut": ""}),
        Point: (Point(1.5), {"x": 1.5, "label": None}),
        Form: ({"due": date(2030, 1, 31)}, {"due": "2030-01-31"}),
    }[model]
    asking = Asking(bench, "node", "sync", lambda app: app.interrupt("any", value))
    asking.app.interrupt_type("any", payload=model)
    (asked,) = asking.go_on()["__interrupt__"]
    assert (asked.value, asked.response_schema) == (stored, None)
    asking.go_on(Command(resume={asked.id: {"anything": 1}}))
    assert asking.heard[-1] == {"anything": 1}


# -- without a type ----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("place", "colour"), [("node", "async"), ("tool", "sync"), ("agent", "async")])
def test_a_schema_of_langgraph(bench: Bench, place: str, colour: Colour) -> None:
    """LangGraph's own `interrupt(value, response_schema=…)`: its schema in the entry, its validated object, and the same end for what it refuses."""
    asking = Asking(bench, place, colour, lambda app: interrupt("approve?", response_schema=ApprovalResponse))
    (asked,) = asking.go_on()["__interrupt__"]
    assert asked.response_schema == TypeAdapter(ApprovalResponse).json_schema()
    with pytest.raises(InvalidAnswer, match=r"\$"):
        asking.go_on(Command(resume={asked.id: {"approved": True}}))
    asking.go_on(Command(resume={asked.id: ANSWER}))
    assert asking.heard[-1] == READ

    refusing = Asking(bench, place, colour, lambda app: interrupt("approve?", response_schema=ApprovalResponse))
    (asked,) = refusing.go_on()["__interrupt__"]
    with pytest.raises(UnusableAnswer, match=rf"{asked.id}.*\$\.limit"):
        refusing.go_on(Command(resume={asked.id: TOO_MUCH}))
    assert EventType.ACTIVITY_FAILED not in refusing.event_types


def test_a_node_that_is_named_like_a_type(bench: Bench) -> None:
    """A plain interrupt goes by its node's name; a type of that name has no say in its answers."""
    asking = Asking(bench, "node", "async", lambda app: interrupt("plain?", response_schema={"type": "string"}))
    asking.app.interrupt_type("node", response=ApprovalResponse)
    (asked,) = asking.go_on()["__interrupt__"]
    assert asking.frontier.entries[0].name == "node"
    asking.go_on(Command(resume={asked.id: "yes"}))
    assert set(asking.heard) == {"yes"}


def test_a_schema_that_is_none(bench: Bench) -> None:
    """A question whose JSON Schema is not valid cannot be answered, and whoever tries hears so."""
    asking = Asking(bench, "node", "async", lambda app: interrupt("?", response_schema={"type": "string", "pattern": "("}))
    (asked,) = asking.go_on()["__interrupt__"]
    with pytest.raises(ConfigurationError, match=f"{asked.id} cannot be answered"):
        asking.resolve("x")
