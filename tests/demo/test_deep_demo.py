"""`mongo-durable demo --deep`, as a user runs it, and its own check."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import replace

import pymongo
import pytest
from langchain_core.messages import AIMessage

from mongo_durable.demo.deep_story import BUYS, EFFECTS, SAID, Account, faults
from mongo_durable.demo.shop import EffectLine
from mongo_durable.demo.telling import Process
from mongo_durable.snapshots import RunSnapshot
from mongo_durable.timeline import ActivityLine, AttemptLine, Timeline
from tests.support.demos import demo


def test_the_deep_demo_proves_its_claims(mongo_uri: str) -> None:
    """A sub-agent asks, two workers are killed by SIGKILL, one of them inside the sub-agent's tool; the timeline shows the sub-agents' paths."""
    ended = demo(mongo_uri, "--deep")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    printed = ended.stdout
    assert "proved: killed twice, one report" in printed
    assert re.search(r"^1 +agent/1/market/1/model:2@3#1 +LLM +market +completed", printed, re.MULTILINE)
    assert re.search(r"^2 +agent/1/survey/1/\[0\]:\d+@3#t1 +TOOL +buy_report +none: the process died inside", printed, re.MULTILINE)
    assert re.search(r"^3 +agent/1/survey/1/\[0\]:\d+@3#t1 +TOOL +buy_report +completed", printed, re.MULTILINE)
    assert '"position": "agent/1/survey/1/' in printed
    named = re.search(r"^in database (\S+)$", printed, re.MULTILINE)
    assert named is not None
    with pymongo.MongoClient(mongo_uri) as client:
        assert named[1] not in client.list_database_names(), "its database is dropped"


def test_the_deep_demo_takes_no_model(mongo_uri: str) -> None:
    """--deep with --model is wrong usage."""
    ended = demo(mongo_uri, "--deep", "--model", "openai:gpt-5")
    assert ended.returncode == 2
    assert "--deep" in ended.stderr


def _line(name: str, position: str) -> ActivityLine:
    return ActivityLine(activity_id=position, kind="LLM", name=name, position=position, is_executed=True, attempt=1, outcome="completed")


def _account() -> Account:
    effects = []
    for effect, count in EFFECTS.items():
        for number in range(count):
            for attempt in (1, 2) if effect == BUYS else (1,):
                effects.append(EffectLine(effect=effect, key=f"{effect}{number}", attempt=attempt))
            effects.append(EffectLine(effect=effect, key=f"{effect}{number}"))
    executed = [_line("root", "agent/1/model@2#1"), _line("market", "agent/1/market/1/model:2@3#1"), _line(BUYS, "agent/1/survey/1/[0]:3@3#t1")]
    endings = ("suspended", None, "completed")
    return Account(
        snapshot=RunSnapshot(
            run_id="r",
            workflow="research",
            version="1",
            thread_id="r",
            status="completed",
            generation=1,
            attempt=3,
            output={"messages": [AIMessage(SAID)]},
            error=None,
            frontier=None,
            submitted_at=None,
            ended_at=None,
        ),
        timeline=Timeline(
            attempts=[
                AttemptLine(fence=fence, owner="o", started_at=None, recorded=(), executed=executed if fence == 1 else [], ending=ending)
                for fence, ending in enumerate(endings, 1)
            ]
        ),
        effects=effects,
        workers=[Process(name=name, pid=1, exit_code=code) for name, code in (("A", -signal.SIGKILL), ("B", -signal.SIGKILL), ("C", 0))],
    )


def test_the_deep_story_as_it_should_be_has_no_fault() -> None:
    """What the demo claims is accepted when it is so."""
    assert faults(_account()) == []


def _elsewhere(account: Account, name: str, position: str) -> Account:
    account.timeline.attempts[0].executed.append(_line(name, position))
    return account


_FALSE: dict[str, Callable[[Account], Account]] = {
    "a second report": lambda it: replace(it, effects=[*it.effects, EffectLine(effect=BUYS, key=f"{BUYS}0")]),
    "a search that ran again": lambda it: replace(it, effects=[*it.effects, EffectLine(effect="search", key="search0", attempt=3)]),
    "a worker that was not killed": lambda it: replace(it, workers=[*it.workers[:1], replace(it.workers[1], exit_code=0), it.workers[2]]),
    "a run that failed": lambda it: replace(it, snapshot=replace(it.snapshot, status="failed")),
    "another answer": lambda it: replace(it, snapshot=replace(it.snapshot, output={"messages": [AIMessage("Done.")]})),
    "a missing attempt": lambda it: replace(it, timeline=Timeline(attempts=it.timeline.attempts[:2])),
    "a sub-agent at another's path": lambda it: _elsewhere(it, "market", "agent/1/survey/1/model:2@3#1"),
    "a root model below": lambda it: _elsewhere(it, "root", "agent/1/market/1/model:2@3#1"),
}


@pytest.mark.parametrize("lie", list(_FALSE))
def test_a_false_deep_story_is_found_out(lie: str) -> None:
    """Each claim of the demo fails when it is not so."""
    assert faults(_FALSE[lie](_account()))
