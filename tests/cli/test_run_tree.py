"""A run as a tree."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from io import StringIO
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage
from rich.console import Console

from mongo_durable.cli.run_tree import Story, run_tree, terms_of
from mongo_durable.protocol.events import ActivityKind, Event, EventType
from mongo_durable.protocol.identity import Position
from mongo_durable.snapshots import Draft, DraftAnswer, Question, RunSnapshot
from mongo_durable.store.audit import Refusal
from mongo_durable.timeline import timeline

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
ASKED = "act_question"


class Writing:
    """A history, one event a second."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.fence = 0

    def add(self, event_type: EventType, **fields: Any) -> Writing:
        seq = len(self.events) + 1
        self.events.append(Event(run_id="po-17", seq=seq, fence=self.fence, type=event_type, at=NOON + timedelta(seconds=seq), **fields))
        return self

    def attempt(self) -> Writing:
        self.fence += 1
        return self.add(EventType.ATTEMPT_STARTED, data={"owner": f"host-{self.fence}"})

    def did(self, position: str, name: str = "look", kind: str = "TOOL", result: Any = "found", *, given: Any = None) -> Writing:
        where: dict[str, Any] = {"position": Position.parse(position), "activity_id": f"act_{position}", "kind": ActivityKind(kind), "name": name}
        return self.add(EventType.ACTIVITY_STARTED, **where, value=given).add(EventType.ACTIVITY_COMPLETED, **where, value=result)

    def suspended(self, position: str = "agent/1/ask@9#!1") -> Writing:
        entry = {"activity_id": ASKED, "name": "approval", "position": position}
        return self.add(EventType.ACTIVITIES_SUSPENDED, data={"generation": 1, "entries": [entry]})


def story(history: Writing, status: str = "suspended", **parts: Any) -> Story:
    """What is told of a history."""
    run = RunSnapshot(
        run_id="po-17",
        workflow="procurement",
        version="1",
        thread_id="t1",
        status=status,
        generation=1,
        attempt=history.fence,
        output=parts.pop("output", None),
        error=None,
        frontier=None,
        submitted_at=NOON,
        ended_at=None,
    )
    return Story(**{"run": run, "input": None, "timeline": timeline(history.events), "questions": {}, "draft": None, "refusals": [], **parts})


def lines(told: Story, *, width: int = 100, **options: bool) -> list[str]:
    """The tree as a terminal of this width shows it, without its branches."""
    out = Console(file=StringIO(), width=width, highlight=False)
    out.print(run_tree(told, **options))
    assert isinstance(out.file, StringIO)
    drawn = out.file.getvalue().splitlines()
    assert all(len(each) <= width for each in drawn)
    return [each.strip("│├└─ ") for each in drawn]


def question(**fields: Any) -> Question:
    asked = {"activity_id": ASKED, "name": "approval", "kind": "INTERRUPT", "position": "agent/1/ask@9#!1", "value": "may I?"}
    return Question(**{**asked, "response_schema": None, **fields})


def test_many_attempts_and_activities_stay_readable() -> None:
    """With five attempts and fifty activities each body that ran has one line, and each attempt one for all that it replayed."""
    history = Writing()
    for attempt in range(5):
        history.attempt()
        for number in range(10):
            history.did(f"agent/1/node@{attempt}#{number + 1}", result="x" * 1000)
    told = story(history, "running")
    shown = lines(told)
    assert len([each for each in shown if "TOOL" in each]) == 50
    assert [each for each in shown if "replayed" in each] == [f"{number} recorded activities replayed" for number in (10, 20, 30, 40)]
    assert len(shown) < 75
    assert any(each.endswith("…") for each in shown)
    whole = lines(told, has_replayed=True)
    assert len([each for each in whole if "replayed from attempt" in each]) == 10 + 20 + 30 + 40
    assert len([each for each in whole if "replayed from attempt 1 " in each]) == 40


def test_activities_stand_under_their_operation_path() -> None:
    """A sub-agent, a child graph and a tool's own body are branches; a lonely activity has its path on its own line."""
    history = Writing().attempt()
    history.did("agent/1/model@1#1", "model", "LLM")
    history.did("agent/1/research/2/model:1@2#1", "researcher", "LLM")
    history.did("agent/1/research/2/tools:2@2#t1", "search", given={"query": "desks"})
    history.did("agent/1/tools@2#t1", "order")
    history.did("agent/1/tools/t1@2#1", "pay", "ACTIVITY")
    shown = lines(story(history, "running"))
    start = next(number for number, each in enumerate(shown) if each.startswith("step 1"))
    assert shown[start:] == [
        'step 1  ✓ LLM      model  model#1  1.0 s  → "found"',
        "step 2",
        "research/2",
        '✓ LLM      researcher  model:1#1  1.0 s  → "found"',
        '✓ TOOL     search  tools:2#t1  1.0 s  {"query": "desks"} → "found"',
        '✓ TOOL     order  tools#t1  1.0 s  → "found"',
        '✓ ACTIVITY pay  #1  1.0 s  → "found"',
    ]


def test_messages_are_told_not_dumped() -> None:
    """Of a model call: what it said and called; of many messages: how many, and the last."""
    answer = AIMessage("Buying.", tool_calls=[{"name": "buy", "args": {"item": "desk"}, "id": "1"}])
    history = Writing().attempt().did("agent/1/model@1#1", "model", "LLM", {"message": answer})
    told = story(history, "completed", output={"messages": [HumanMessage("Buy!"), AIMessage("Bought.")], "n": 1})
    shown = lines(told)
    assert 'step 1  ✓ LLM      model  model#1  1.0 s  → “Buying.” calls buy({"item": "desk"})' in shown
    assert shown[-1] == "output  messages: 2 messages, the last: “Bought.”; n: 1"
    assert '"tool_calls"' in "".join(lines(told, is_whole=True, width=2000))


def test_a_frontier_tells_who_is_asked_and_what_was_answered() -> None:
    """Audience, escalation, deadline and default while it is open; the draft so far; what was refused; after a draft, who gave which answer."""
    history = Writing().attempt().did("agent/1/tools@9#t1").suspended("agent/1/tools/t1@9#!1")
    asked = question(
        audience="clerks",
        escalates_to="managers",
        escalates_at=datetime(2099, 1, 1, tzinfo=UTC),
        expires_at=datetime(2099, 1, 2, tzinfo=UTC),
        has_default=True,
        default={"ok": False},
    )
    draft = Draft(
        run_id="po-17",
        generation=1,
        digest="d",
        answers={ASKED: DraftAnswer(value=True, by="ada", note="cheap", at=datetime.now(UTC))},
        missing=(),
        resolution=None,
    )
    refused = Refusal(
        run_id="po-17", generation=1, code="not_authorized", by="eve", channel="cli", activity_ids=(ASKED,), message="eve may not", at=NOON
    )
    shown = lines(story(history, questions={(1, ASKED): asked}, draft=draft, refusals=[refused]), width=160)
    frontier = next(number for number, each in enumerate(shown) if each.startswith("frontier 1  open"))
    assert shown[frontier + 1] == f'{ASKED}  approval asks "may I?"'
    assert shown[frontier + 2] == 'for clerks, from 2099-01-01 00:00:00Z for managers as well · goes on with {"ok": false} at 2099-01-02 00:00:00Z'
    assert shown[frontier + 3].startswith("in the draft: ada says  true  “cheap”  ")
    assert shown[frontier + 4] == "refused  not_authorized  an answer of eve (cli) 2026-01-01 12:00:00Z: eve may not"
    assert shown[-1] == "waits: for answers to frontier 1"

    given = {ASKED: {"by": "ada", "note": "cheap", "at": NOON}}
    data = {"generation": 1, "answers": {ASKED: True}, "resolved_by": "ada", "note": None, "channel": "draft", "answered_by": given}
    closed = lines(story(history.add(EventType.ACTIVITIES_RESOLVED, data=data), "ready", questions={(1, ASKED): asked}, draft=draft), width=160)
    assert closed[frontier].startswith("frontier 1  resolved by ada (draft) after 1.0 s")
    assert closed[frontier + 2 :] == ["for clerks, from 2099-01-01 00:00:00Z for managers as well", "answer of ada  true  “cheap”"]


def test_an_escalated_question_says_so() -> None:
    """From the time of escalation on both audiences are asked; without a default a question expires."""
    asked = question(audience="clerks", escalates_to="managers", escalates_at=NOON, expires_at=NOON)
    assert terms_of(asked) == "for clerks and, since 2026-01-01 12:00:00Z, for managers as well · expires at 2026-01-01 12:00:00Z"
    assert terms_of(question()) == ""


def test_what_did_not_end_says_why() -> None:
    """A tool whose question is open waits for it; what had no outcome when its attempt was over is told from what runs now; a reason to cancel."""
    where: dict[str, Any] = {"position": Position.parse("agent/1/tools@1#t1"), "activity_id": "act_t", "kind": ActivityKind.TOOL, "name": "buy"}
    history = Writing().attempt().add(EventType.ACTIVITY_STARTED, **where)
    asking = Writing().attempt().add(EventType.ACTIVITY_STARTED, **where).suspended("agent/1/tools/t1@1#!1")
    assert any("asks, and goes on when that is answered" in each for each in lines(story(asking)))
    assert "… TOOL     buy  tools#t1  runs" in " ".join(lines(story(history, "running")))
    assert "no outcome in this attempt" in " ".join(lines(story(history.attempt(), "running")))
    cancelled = story(history.add(EventType.RUN_CANCELLED, data={"reason": "too dear"}), "cancelled")
    assert lines(cancelled)[-1] == "cancelled  “too dear”"


def test_whole_means_whole() -> None:
    """With --full nothing is cut, in a terminal of any width; each activity has its id and whole position."""
    history = Writing().attempt().did("agent/1/research/2/tools@1#t1", result="y" * 3000)
    told = story(history, "running", input={"text": "x" * 3000})
    assert sum(each.count("x") for each in lines(told)) < 100
    whole = "".join(lines(told, is_whole=True))
    assert "x" * 3000 in whole.replace("\n", "")
    assert "y" * 3000 in whole
    assert "agent/1/research/2/tools@1#t1" in whole
    assert "act_agent/1/research/2/tools@1#t1" in whole
