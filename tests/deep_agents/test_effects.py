"""Everything else that a deep agent does outside is recorded once: summaries, models and tools that middleware brings in, files of the state."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from deepagents.backends import FilesystemBackend, StateBackend
from deepagents.middleware.summarization import SummarizationMiddleware
from langchain.agents.middleware import AgentMiddleware, ModelFallbackMiddleware
from langchain.agents.structured_output import ToolStrategy
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult

from mongo_durable.errors import ConfigurationError
from mongo_durable.protocol.events import EventType
from tests.deep_agents.kit import (
    Inputs,
    Speaker,
    call,
    final_messages,
    in_turn,
    order,
    researcher,
    run,
    speaker,
    subagent,
    task,
)
from tests.deep_agents.test_kill_matrix import At
from tests.deep_agents.test_paths import COLOURS
from tests.langgraph.bench import Bench, Colour, Make, Told
from tests.langgraph.kit import Kit, Ledger, answer


def completed(told: Told, kind: str = "ACTIVITY") -> Counter[str]:
    """Recorded results, by name."""
    return Counter(each.name for each in told.events if each.type is EventType.ACTIVITY_COMPLETED and each.kind == kind)


class Follows(Speaker):
    """A model that goes on from the last tool's result: how much of its history it still sees does not matter."""

    def _answer(self, messages: list[BaseMessage]) -> ChatResult:
        self.ledger.note("LLM", self.name_, [(each.type, each.content) for each in messages])
        results = [each.content for each in messages if each.type == "tool"]
        number = int(re.findall(r"<(\d)>", str(results[-1]))[-1]) if results else 0
        said = order(call("ask" if number == 1 else "plain", f"p{number}", q=f"<{number + 1}>")) if number < 4 else AIMessage("report")
        return ChatResult(generations=[ChatGeneration(message=said)])


def summarizing(backend: Any) -> Make:
    """Two sub-agents whose history is summarised on the way, and kept on a backend."""

    def make(kit: Kit) -> Any:
        summary = speaker(kit, "summary", lambda asked, number: AIMessage("so far, so good"))
        middleware = SummarizationMiddleware(model=summary, backend=backend, trigger=("messages", 4), keep=("messages", 2))
        worker = subagent(kit, "worker", researcher(), middleware=[middleware]) | {"model": Follows(say=None, ledger=kit.ledger, name_="worker")}
        root = in_turn(order(task("A", "worker"), task("B", "worker")), AIMessage("done"))
        return kit.app.deep_agent(model=speaker(kit, "root", root), tools=kit.tools, subagents=[worker])

    return make


@pytest.mark.parametrize("where", ["state", "disk"])
@pytest.mark.parametrize("colour", COLOURS)
def test_a_summary_is_made_once(bench: Bench, inputs: Inputs, tmp_path: Path, colour: Colour, where: str) -> None:
    """The summary's own model call is an activity of its own; the name of the file with the history and the date in it stay in every attempt."""
    (tmp_path / "conversation_history").mkdir()
    make = summarizing(StateBackend() if where == "state" else FilesystemBackend(root_dir=tmp_path, virtual_mode=True))
    calm = run(bench, make, colour)
    assert completed(calm, "LLM").total() >= 2 * 5 + 2 + 2, "answers of workers and root, and a summary for each worker"
    for point in (45, 110):
        shaken = run(bench, make, colour, killer=(killer := At(point)), order=random.Random(point), say=_verdict_or_answer)
        assert killer.is_done
        assert shaken.positions == calm.positions
    given = [min(each) for each in inputs.of(calm.events[0].run_id).values()]
    assert any("/conversation_history/session_" in each for each in given)
    files = calm.state.get("files", {})
    kept = [each["content"] for each in files.values()] or [each.read_text() for each in (tmp_path / "conversation_history").iterdir()]
    assert kept
    assert all("## Summarized at 2" in text for text in kept)


def _verdict_or_answer(question: Any) -> Any:
    # Whether the history was appended before the process died, nobody here looks; a section may be missing or there twice.
    return {"verdict": "rerun"} if isinstance(question, dict) else answer(question)


def test_plain_and_wrapped_are_recorded_once(bench: Bench, inputs: Inputs) -> None:
    """Models and tools, wrapped by the caller or not: one activity a call."""

    def plain_tool(q: str) -> str:
        """Nothing about it is durable."""
        return f"plainly {q}"

    def make(kit: Kit) -> Any:
        root = in_turn(order(task("A", "research"), call("plain_tool", "p", q="1"), call("plain", "w", q="2")), AIMessage("done"))
        wrapped = kit.app.llm(speaker(kit, "root", root))
        return kit.app.deep_agent(
            model=wrapped,
            tools=[plain_tool, kit.plain],
            subagents=[subagent(kit, "research", in_turn(order(call("plain_tool", "p", q="3")), AIMessage("done"))) | {"tools": [plain_tool]}],
            middleware=[kit.app.middleware()],
        )

    told = run(bench, make, "mixed")
    assert completed(told, "TOOL") == Counter({"plain_tool": 2, "plain": 1})
    assert completed(told, "LLM").total() == 4


class _Routes(AgentMiddleware[Any, Any, Any]):
    """Sends every call to another, plain model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._make = lambda: model

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        return handler(request.override(model=self._make()))

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        return await handler(request.override(model=self._make()))


class _Fails(Speaker):
    def _answer(self, messages: Any) -> Any:
        raise ConnectionError("no answer")


@pytest.mark.parametrize("colour", COLOURS)
def test_models_of_middleware(bench: Bench, inputs: Inputs, colour: Colour) -> None:
    """A model that middleware falls back to, or routes to, is recorded like the agent's own, in the root and in sub-agents."""

    def make(kit: Kit) -> Any:
        root = in_turn(order(task("A", "research")), AIMessage("done"))
        fallback = ModelFallbackMiddleware(speaker(kit, "fallback", root))
        routes = _Routes(speaker(kit, "routed", researcher("ask")))
        failing = _Fails(say=root, ledger=kit.ledger, name_="failing")
        return kit.app.deep_agent(
            model=failing, tools=kit.tools, middleware=[fallback], subagents=[subagent(kit, "research", root, middleware=[routes])]
        )

    ledger = Ledger()
    told = run(bench, make, colour, ledger=ledger)
    assert told.attempts == 2
    assert all(count == 1 for (kind, _, _), count in ledger.ran.items() if kind == "LLM")
    assert completed(told, "LLM").total() == 5
    assert sum(each.type is EventType.ACTIVITY_FAILED for each in told.events) == 2


@pytest.mark.parametrize("colour", COLOURS)
def test_files_of_the_state(bench: Bench, inputs: Inputs, colour: Colour) -> None:
    """Times of files are recorded ones: a newer file is newer in every attempt, and the thread's next turn has all of them."""

    def make(kit: Kit) -> Any:
        root = in_turn(
            order(call("write_file", "1", file_path="/z.md", content="z")),
            order(call("write_file", "2", file_path="/a.md", content="a")),
            order(call("ask", "q", q="?")),
            order(call("edit_file", "3", file_path="/z.md", old_string="z", new_string="zz")),
            order(call("glob", "g", pattern="*.md")),
            AIMessage("done"),
        )
        second = in_turn(order(call("read_file", "r", file_path="/z.md"), call("glob", "g2", pattern="*.md")), AIMessage("done"))
        return kit.app.deep_agent(
            model=speaker(kit, "root", lambda asked, number: (root if asked == "go" else second)(asked, number)), tools=kit.tools
        )

    thread = f"files-{colour}"
    told = run(bench, make, colour, thread_id=thread)
    said = [each.content for each in final_messages(bench, told) if each.type == "tool"]
    assert said[-1] == "['/z.md', '/a.md']"
    files = told.state["files"]
    assert files["/z.md"]["created_at"] < files["/a.md"]["created_at"] < files["/z.md"]["modified_at"]
    next_turn = run(bench, make, colour, thread_id=thread, given={"messages": [("user", "again")]})
    said = [each.content for each in final_messages(bench, next_turn) if each.type == "tool"]
    assert "zz" in str(said[-2])
    assert said[-1] == "['/z.md', '/a.md']"


def test_a_response_format_without_a_title(bench: Bench, inputs: Inputs) -> None:
    """LangChain draws a name for a schema without a title: it gets one, or is refused where it cannot be given one."""
    schema = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"], "description": "An answer."}

    def make(kit: Kit) -> Any:
        root = in_turn(order(call("ask", "a", q="?")), order(call("response_format", "f", x="1")))
        return kit.app.deep_agent(model=speaker(kit, "root", root), tools=kit.tools, response_format=schema)

    told = run(bench, make)
    assert told.attempts == 2
    assert told.state["structured_response"] == {"x": "1"}
    with pytest.raises(ConfigurationError, match="no title"):
        bench.app("untitled").deep_agent(model=Speaker(say=None, ledger=None, name_="x"), response_format=ToolStrategy(schema))


class _Anthropic(ChatAnthropic):
    """A model of the provider's class that asks nobody, and keeps what it would have sent."""

    sent: list[Any] = []  # noqa: RUF012 - a field of a Pydantic model, copied for each

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **options: Any) -> ChatResult:
        self.sent.append(options)
        said = AIMessage("done") if messages[-1].type == "tool" or "sub" in str(messages[0].content) else order(task("A", "research"))
        return ChatResult(generations=[ChatGeneration(message=said)])

    async def _agenerate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **options: Any) -> ChatResult:
        return self._generate(messages, stop, run_manager, **options)


@pytest.mark.parametrize("colour", COLOURS)
def test_prompts_are_cached_as_ever(bench: Bench, inputs: Inputs, colour: Colour) -> None:
    """Prompt caching sees of what provider a model is, in the root and in sub-agents, although the model is durable."""
    model = _Anthropic(model="claude-sonnet-4-6", api_key="none", sent=[])

    def make(kit: Kit) -> Any:
        sub = {"name": "research", "description": "r", "system_prompt": "sub", "model": model, "tools": []}
        return kit.app.deep_agent(model=model, subagents=[sub])

    told = run(bench, make, colour)
    assert completed(told, "LLM").total() == 3
    assert [each["cache_control"]["type"] for each in model.sent] == ["ephemeral"] * 3
