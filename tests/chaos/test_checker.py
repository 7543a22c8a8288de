"""The checker of the chaos suite has teeth: a good story that was damaged by hand is never called good."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from mongo_durable import App, Runner
from tests.chaos import checker
from tests.chaos.checker import Document, Story
from tests.chaos.outside import BEGUN, HAPPENED, Line, Outside
from tests.chaos.people import People
from tests.chaos.weather import Pause
from tests.chaos.workload import Order, Workload
from tests.support.invariants import Cancelled

FAR_S = 5.0
DATABASE = "chaos_checker"
ORDERS = [
    *(Order(run_id=f"desk-{plan}", workflow="desk", plan=plan, thread_id="talk") for plan in range(2)),
    *(Order(run_id=f"fan-{number}", workflow="fan") for number in range(2)),
    Order(run_id="bench", workflow="bench"),
    Order(run_id="dropped", workflow="absent", cancel_after_s=0),
]


async def _tell(uri: str, effects: Path) -> Story:
    """A quiet day: one runner, everybody polite, one order of something that nobody makes, called off."""
    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(uri)
    await client.drop_database(DATABASE)

    def make(name: str, **options: Any) -> App:
        return App(name, uri=uri, database=DATABASE, **options)

    apps = Workload(make, DATABASE, client, Outside(effects, lambda _: 1.0)).apps()
    people = People(uri, DATABASE, ORDERS, effects, at_once=len(ORDERS), seed=0)
    async with Runner(apps, sweep_interval=timedelta(seconds=0.5)):
        async with asyncio.timeout(60):
            await people.live_and_let_live()
    story = await checker.gather(uri, DATABASE, people.told, effects)
    await client.drop_database(DATABASE)
    await client.close()
    return story


@pytest.fixture(scope="module")
def good(mongo_uri: str, tmp_path_factory: pytest.TempPathFactory) -> Story:
    """A story in which nothing is wrong."""
    return asyncio.run(_tell(mongo_uri, tmp_path_factory.mktemp("chaos") / "effects"))


@pytest.fixture
def story(good: Story) -> Story:
    """A copy to damage."""
    return deepcopy(good)


def _event(story: Story, run_id: str, **wanted: Any) -> Document:
    return next(each for each in story.snapshot.events[run_id] if all(each.get(name) == value for name, value in wanted.items()))


def _line(story: Story, name: str, moment: str = BEGUN) -> Line:
    return next(each for each in story.lines if (each.name, each.moment) == (name, moment))


def _swap(story: Story, old: Line, **change: Any) -> None:
    story.lines[story.lines.index(old)] = replace(old, **change)


def _accepted_and_gone(story: Story) -> None:
    del story.snapshot.runs["bench"]
    del story.snapshot.events["bench"]


def _not_ended(story: Story) -> None:
    story.snapshot.runs["bench"]["status"] = "failed"


def _cancelled_by_nobody(story: Story) -> None:
    story.told.called_off.discard("dropped")


def _promised_and_undone(story: Story) -> None:
    story.told.promises.append(Cancelled(run_id="bench"))


def _answers_swapped(story: Story) -> None:
    lines = story.outputs["fan-0"]["lines"]
    lines[1], lines[3] = (lines[1].replace("worker 1 ", "worker 3 "), lines[3].replace("worker 3 ", "worker 1 "))


def _other_word(story: Story) -> None:
    lines = story.outputs["bench"]["lines"]
    lines[1] += "s"


def _turn_forgotten(story: Story) -> None:
    later = max(("desk-0", "desk-1"), key=lambda run_id: int(story.snapshot.runs[run_id]["turn"]))
    first = next(index for index, message in enumerate(story.outputs[later]["messages"]) if index and message.type == "human")
    del story.outputs[later]["messages"][:first]


def _asked_twice(story: Story) -> None:
    frontier = story.snapshot.frontiers["bench"][0]
    frontier["entries"].append({**frontier["entries"][0], "activity_id": "act_other"})


def _ran_in_a_second_attempt(story: Story) -> None:
    line = _line(story, "pay")
    story.lines.append(replace(line, fence=line.fence + 1, at=line.at - FAR_S))


def _ran_twice_in_one_attempt(story: Story) -> None:
    story.lines.append(_line(story, "note"))


def _ran_again_after_its_outcome(story: Story) -> None:
    line = _line(story, "note")
    fence = max(each["fence"] for each in story.snapshot.events[line.run_id]) + 1
    _event(story, line.run_id, type="activity.started", activity_id=line.key)["fence"] = fence
    _swap(story, line, fence=fence)


def _began_without_a_start(story: Story) -> None:
    line = _line(story, "scrap")
    _swap(story, line, fence=line.fence + 7)


def _began_late(story: Story) -> None:
    line = _line(story, "row")
    outcome = _event(story, line.run_id, activity_id=line.key, type="activity.completed")
    outcome["fence"] += 1
    _swap(story, line, at=outcome["at"].timestamp() + FAR_S)


def _began_without_a_lease(story: Story) -> None:
    _swap(story, _line(story, "row"), lease_left=-FAR_S)


def _started_after_its_outcome(story: Story) -> None:
    start = _event(story, "bench", type="activity.started", name="scrap")
    story.snapshot.events["bench"].append({**start, "seq": story.snapshot.events["bench"][-1]["seq"] + 1})


def _sealed_twice(story: Story) -> None:
    seal = _event(story, "bench", type="step.committed")
    story.snapshot.events["bench"].append({**seal, "seq": story.snapshot.events["bench"][-1]["seq"] + 1})


def _another_position(story: Story) -> None:
    _event(story, "fan-1", type="activity.started", name="row")["position"] = "agent/1/work/9@1#1"


def _entered_twice(story: Story) -> None:
    story.ledger.append(story.ledger[0])


def _never_entered(story: Story) -> None:
    story.ledger.pop()


def _entered_by_nobody(story: Story) -> None:
    story.ledger.append({**story.ledger[0], "key": "act_other"})


def _never_happened(story: Story) -> None:
    story.lines.remove(_line(story, "pay_sync", HAPPENED))


def _row_gone(story: Story) -> None:
    story.rows.popitem()


def _said_twice(story: Story) -> None:
    story.memory["desk-0"].append(story.memory["desk-0"][-1])


def _forgotten(story: Story) -> None:
    story.memory["fan-0"].pop()


def _told_what_is_wrong(story: Story) -> None:
    story.told.wrong.append("submit r1: RunConflict")


def _crashed(story: Story) -> None:
    story.log.append({"pid": 1, "at": 0.0, "level": "ERROR", "logger": "mongo_durable.runner.runner", "text": "an attempt failed"})


def _ended_by_itself(story: Story) -> None:
    story.wrong.append("worker 7 ended by itself, with 1")


def _hole(story: Story) -> None:
    del story.snapshot.events["fan-0"][3]


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (_accepted_and_gone, "end"),
        (_not_ended, "end"),
        (_cancelled_by_nobody, "end"),
        (_promised_and_undone, "I10"),
        (_answers_swapped, "output"),
        (_other_word, "output"),
        (_turn_forgotten, "output"),
        (_asked_twice, "asked"),
        (_ran_in_a_second_attempt, "ran"),
        (_ran_twice_in_one_attempt, "ran"),
        (_ran_again_after_its_outcome, "ran"),
        (_began_without_a_start, "I4"),
        (_began_late, "late"),
        (_began_without_a_lease, "late"),
        (_started_after_its_outcome, "I7"),
        (_sealed_twice, "I7"),
        (_another_position, "I11"),
        (_entered_twice, "once"),
        (_never_entered, "once"),
        (_entered_by_nobody, "once"),
        (_never_happened, "effect"),
        (_row_gone, "effect"),
        (_said_twice, "memory"),
        (_forgotten, "memory"),
        (_told_what_is_wrong, "told"),
        (_crashed, "log"),
        (_ended_by_itself, "log"),
        (_hole, "I1"),
    ],
)
def test_damage_is_found(damage: Callable[[Story], None], fault: str, story: Story) -> None:
    """A story is good before it is damaged, and after it the checker names what was damaged."""
    assert not list(checker.faults(story))
    damage(story)
    found = list(checker.faults(story))
    assert any(each.startswith(f"{fault} ") for each in found), found


def test_a_late_beginning_is_excused_by_standing_still_alone(story: Story) -> None:
    """A process that stood still between its last look at the lease and the body is no fault of the library; one that did not is."""
    line = _line(story, "row")
    _swap(story, line, lease_left=-FAR_S)
    story.pauses.append(Pause(line.pid, line.at - FAR_S, line.at - 0.01))
    assert not list(checker.faults(story))
    story.pauses[0] = Pause(line.pid + 1, line.at - FAR_S, line.at - 0.01)
    assert Counter(each.split()[0] for each in checker.faults(story)) == {"late": 1}


def test_a_person_may_let_an_effect_run_again(story: Story) -> None:
    """An effect that runs again is a fault unless somebody who was asked said that it shall, once for each time."""
    line = _line(story, "pay")
    again = replace(line, fence=line.fence + 1)
    story.lines.append(again)
    activities = checker.activities(story.snapshot)
    activities[line.key].fences.add(again.fence)
    activities[line.key].outcome = {**activities[line.key].outcome, "fence": again.fence}  # type: ignore[dict-item]
    assert [each.split()[0] for each in checker.faults_of_effects(story, activities)] == ["ran"]
    activities[line.key].reruns = 1
    assert not list(checker.faults_of_effects(story, activities))
