"""A run as a tree: attempts, the steps and activities of each, nested by operation path, and the frontiers between them with their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from typing import TYPE_CHECKING, Any

from mongo_durable.cli.output import STYLES, age, in_brief, in_one_line, length, line, moment, printable

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

    from mongo_durable.protocol.identity import Position
    from mongo_durable.snapshots import Draft, Question, RunSnapshot
    from mongo_durable.store.audit import Refusal
    from mongo_durable.timeline import ActivityLine, AttemptLine, FrontierLine, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """All that is told of a run.

    Attributes:
        input: What it was submitted with.
        questions: Of all its frontiers, by generation and activity id.
        draft: Of its newest frontier, while that is open; None: nobody has begun one.
        refusals: Of answers, in order.
    """

    run: RunSnapshot
    input: Any
    timeline: Timeline
    questions: Mapping[tuple[int, str], Question]
    draft: Draft | None
    refusals: Sequence[Refusal]


def run_tree(story: Story, *, is_whole: bool = False, has_replayed: bool = False) -> Tree:
    """Draw a run.

    Args:
        is_whole: Values are not cut, and each activity has its id and its whole position.
        has_replayed: Each activity that an attempt took from the history has a line of its own.
    """
    return _Drawing(story, is_whole, has_replayed).draw()


@dataclass(slots=True)
class _Place:
    """What happened at one address (an operation path, and perhaps an ordinal), and at the addresses below it."""

    lines: list[ActivityLine] = field(default_factory=list)
    below: dict[str, _Place] = field(default_factory=dict)

    def at(self, address: Sequence[str]) -> _Place:
        place = self
        for segment in address:
            place = place.below.setdefault(segment, _Place())
        return place


class _Drawing:
    def __init__(self, story: Story, is_whole: bool, has_replayed: bool) -> None:
        self._story = story
        self._is_whole = is_whole
        self._has_replayed = has_replayed
        self._cut_at = None if is_whole else 500

    def draw(self) -> Tree:
        from rich.tree import Tree

        run, found = self._story.run, self._story.timeline
        head = self._line(
            (f"run {printable(run.run_id)}", "bold"),
            f"  {printable(run.workflow)} {printable(run.version)}  ",
            (run.status, STYLES.get(run.status, "")),
            f"  thread {printable(run.thread_id)}" if run.thread_id != run.run_id else "",
            f"  submitted {moment(run.submitted_at)}, ",
            f"ended {age(run.submitted_at, run.ended_at)} later" if run.ended_at is not None else f"{age(run.submitted_at)} ago",
            f"  priority {run.priority}" if run.priority else "",
            f"  fails if not ended at {moment(run.deadline_at)}" if run.deadline_at is not None and not run.is_ended else "",
        )
        tree = Tree(head, guide_style="dim")
        tree.add(self._line(("input  ", "dim"), in_brief(self._story.input, self._cut_at)))
        told: set[int | None] = set()
        for attempt in found.attempts:
            self._attempt(tree, attempt)
            for frontier in found.frontiers:
                if frontier.attempt == attempt.fence:
                    self._frontier(tree, frontier)
                    told.add(frontier.generation)
        for refusal in self._story.refusals:
            if refusal.generation not in told:
                self._refusal(tree, refusal)
        self._end(tree)
        return tree

    def _line(self, *parts: str | tuple[str, str]) -> Text:
        return line(*parts, is_whole=self._is_whole)

    def _end(self, tree: Tree) -> None:
        run = self._story.run
        waits = waits_for(run)
        if waits is not None:
            tree.add(self._line((f"waits: {printable(waits)}", "yellow")))
        if run.output is not None:
            tree.add(self._line(("output  ", "dim"), in_brief(run.output, self._cut_at)))
        if run.error is not None:
            error = tree.add(self._line((f"error {printable(str(run.error.get('type')))}: {printable(str(run.error.get('message')))}", "red")))
            for name in ("position", "expected", "found"):
                if name in run.error:
                    error.add(self._line((f"{name}  ", "dim"), in_one_line(run.error[name], self._cut_at)))
        if self._story.timeline.cancel_reason is not None:
            tree.add(self._line(("cancelled  ", "dim"), f"“{printable(self._story.timeline.cancel_reason)}”"))

    def _attempt(self, tree: Tree, attempt: AttemptLine) -> None:
        after = f" after {age(attempt.started_at, attempt.ended_at)}" if attempt.ended_at is not None else ""
        branch = tree.add(
            self._line(
                (f"attempt {attempt.fence}", "bold"),
                "  ",
                (self._ending(attempt), STYLES.get(attempt.ending or "", "yellow")),
                f"{after}  on {printable(attempt.owner)}  {moment(attempt.started_at)}",
            )
        )
        if attempt.recorded and not self._has_replayed:
            number = len(attempt.recorded)
            branch.add(self._line((f"{number} recorded activit{'y' if number == 1 else 'ies'} replayed", "dim")))
        shown = [*(attempt.recorded if self._has_replayed else ()), *attempt.executed]
        for step, lines in groupby(sorted(shown, key=lambda each: _position(each).step), key=lambda each: _position(each).step):
            place = _Place()
            for each in lines:
                place.at(_address(_position(each))).lines.append(each)
            if len(place.below) == 1 and _is_one_line(place):
                self._grow(branch, place, attempt, f"step {step}  ")
            else:
                self._grow(branch.add(self._line((f"step {step}", "bold dim"))), place, attempt)

    def _ending(self, attempt: AttemptLine) -> str:
        is_last = attempt is self._story.timeline.attempts[-1]
        return "running" if is_last and self._story.run.status == "running" else ending(attempt)

    def _grow(self, branch: Tree, place: _Place, attempt: AttemptLine, prefix: str = "") -> None:
        """Draw what is below a place. A chain of places at which nothing happened is one label."""
        for first, below in place.below.items():
            label = [first]
            while not below.lines and len(below.below) == 1:
                [(segment, below)] = below.below.items()
                label.append(segment)
            if not below.lines:
                self._grow(branch.add(self._line(prefix, (printable("/".join(label)), "bold"))), below, attempt)
                continue
            for each in below.lines:
                twig = branch.add(self._activity(prefix, each, label, attempt))
            self._grow(twig, below, attempt)

    def _activity(self, prefix: str, activity: ActivityLine, label: Sequence[str], attempt: AttemptLine) -> Text:
        is_replayed = activity.attempt != attempt.fence
        mark, style = _mark(activity, is_replayed)
        where = f"{activity.position}  {activity.activity_id}" if self._is_whole else f"{'/'.join(label[:-1])}#{label[-1]}"
        what = f"replayed from attempt {activity.attempt}" if is_replayed else self._what(activity, attempt)
        return self._line(
            prefix,
            (mark, style),
            f" {activity.kind:<8} ",
            (printable(activity.name), "dim" if is_replayed else "bold"),
            "  ",
            (printable(where), "dim"),
            "  ",
            (what, style if style != "green" else ""),
            f"  {values}" if (values := self._values(activity)) else "",
        )

    def _values(self, activity: ActivityLine) -> str:
        found = [in_brief(activity.input, self._cut_at)] if activity.input is not None else []
        if activity.error is not None:
            found.append(f"→ {printable(str(activity.error.get('type')))}: {printable(str(activity.error.get('message')))}")
        elif activity.outcome == "completed" and activity.kind != "TIMER":
            found.append(f"→ {in_brief(activity.result, self._cut_at)}")
        return " ".join(found)

    def _what(self, activity: ActivityLine, attempt: AttemptLine) -> str:
        if activity.kind == "TIMER":
            return "fired" if activity.outcome is not None else f"sleeps until {moment(activity.until)}"
        if not activity.is_executed:
            return f"{activity.outcome}, as a person said; not executed"
        if activity.outcome is not None:
            return length(activity.duration) if activity.outcome == "completed" else f"{activity.outcome} in {length(activity.duration)}"
        if any(_position(activity).encloses(each) for each in self._asked_in(attempt)):
            return "asks, and goes on when that is answered"
        return "runs" if self._ending(attempt) == "running" else "no outcome in this attempt"

    def _asked_in(self, attempt: AttemptLine) -> list[Position]:
        from mongo_durable.protocol.identity import Position

        frontiers = [each for each in self._story.timeline.frontiers if each.attempt == attempt.fence]
        return [Position.parse(str(entry["position"])) for each in frontiers for entry in each.entries]

    def _frontier(self, tree: Tree, frontier: FrontierLine) -> None:
        status = frontier.status.value
        by = f" by {printable(frontier.resolved_by)}" if frontier.resolved_by else ""
        by += f" ({printable(frontier.channel)})" if frontier.channel else ""
        since = f" after {age(frontier.opened_at, frontier.closed_at)}" if frontier.closed_at is not None else f" for {age(frontier.opened_at)}"
        branch = tree.add(
            self._line(
                (f"frontier {frontier.generation}", "bold"),
                "  ",
                (status, STYLES.get(status, "")),
                f"{by}{since}  opened {moment(frontier.opened_at)}",
                f"  “{printable(frontier.note)}”" if frontier.note else "",
            )
        )
        for entry in frontier.entries:
            self._entry(branch, frontier, entry)
        for refusal in self._story.refusals:
            if refusal.generation == frontier.generation:
                self._refusal(branch, refusal)

    def _entry(self, branch: Tree, frontier: FrontierLine, entry: Mapping[str, Any]) -> None:
        activity_id = str(entry["activity_id"])
        question = self._story.questions.get((frontier.generation, activity_id))
        asked = in_brief(question.value, self._cut_at) if question is not None else "a question that is not there any more"
        where = "  " + printable(str(entry["position"])) if self._is_whole else ""
        twig = branch.add(self._line((activity_id, "cyan"), f"{where}  {printable(str(entry['name']))} asks ", (asked, "bold")))
        if question is not None and (terms := terms_of(question) if frontier.status == "open" else asked_of(question)):
            twig.add(self._line((terms, "dim")))
        if frontier.answers is not None and activity_id in frontier.answers:
            answer = in_brief(frontier.answers[activity_id], self._cut_at)
            given = (frontier.answered_by or {}).get(activity_id)
            if given is not None:
                note = f"  “{printable(str(given['note']))}”" if given.get("note") else ""
                twig.add(self._line((f"answer of {printable(str(given['by']))}  ", "green"), f"{answer}{note}"))
            else:
                twig.add(self._line(("default  ", "dim") if frontier.status == "expired" else ("answer  ", "green"), answer))
        draft = self._story.draft
        drafted = draft.answers.get(activity_id) if draft is not None and draft.generation == frontier.generation else None
        if drafted is not None and frontier.answers is None:
            note = f"  “{printable(drafted.note)}”" if drafted.note else ""
            answer = in_brief(drafted.value, self._cut_at)
            twig.add(self._line((f"in the draft: {printable(drafted.by)} says  ", "yellow"), f"{answer}{note}  {age(drafted.at)} ago"))

    def _refusal(self, branch: Tree, refusal: Refusal) -> None:
        by = f" of {printable(refusal.by)}" if refusal.by else ""
        branch.add(
            self._line(
                (f"refused  {printable(refusal.code)}", "red"),
                f"  an answer{by} ({printable(refusal.channel)}) {moment(refusal.at)}: {printable(refusal.message)}",
            )
        )


def ending(attempt: AttemptLine) -> str:
    """How an attempt ended, in words."""
    if attempt.ending == "suspended":
        return f"suspended on frontier {attempt.generation}"
    if attempt.ending is not None:
        return attempt.ending
    sleeps = [each.until for each in attempt.executed if each.until is not None and each.outcome is None]
    if sleeps:
        return f"gave the run back until {moment(min(sleeps))}"
    return f"no end recorded; attempt {attempt.taken_over_by} went on" if attempt.taken_over_by is not None else "no end recorded yet"


def waits_for(run: RunSnapshot) -> str | None:
    """What has to happen before a run goes on; None for one that has ended or is executed."""
    if run.status == "suspended":
        number = len(run.frontier.entries) if run.frontier is not None else None
        questions = "answers" if number is None else "an answer" if number == 1 else f"{number} answers"
        deadline = f", until {moment(run.available_at)}" if run.available_at is not None else ""
        return f"for {questions} to frontier {run.generation}{deadline}"
    return run.waits_for


def asked_of(question: Question, now: datetime | None = None) -> str:
    """Who is asked, in words; empty where the code did not say."""
    if question.audience is None:
        return ""
    first = f"for {printable(question.audience)}"
    if question.escalates_to is None:
        return first
    is_escalated = question.escalates_at is not None and question.escalates_at <= (now or datetime.now(UTC))
    also = f"for {printable(question.escalates_to)} as well"
    return f"{first} and, since {moment(question.escalates_at)}, {also}" if is_escalated else f"{first}, from {moment(question.escalates_at)} {also}"


def terms_of(question: Question, now: datetime | None = None) -> str:
    """Who is asked, and what happens if nobody answers, in words; empty where neither was said."""
    then = f"goes on with {in_one_line(question.default)}" if question.has_default else "expires"
    deadline = f"{then} at {moment(question.expires_at)}" if question.expires_at is not None else ""
    return " · ".join(each for each in (asked_of(question, now), deadline) if each)


def _position(activity: ActivityLine) -> Position:
    from mongo_durable.protocol.identity import Position

    return Position.parse(activity.position)


def _address(position: Position) -> list[str]:
    """The segments below the root, with an ordinal joined to the name that it counts: `research`, `2` is `research/2`."""
    from mongo_durable.protocol.identity import ROOT_PATH

    segments: list[str] = []
    for segment in position.path[len(ROOT_PATH) :]:
        if segment.isdigit() and segments and not segments[-1].isdigit():
            segments[-1] += f"/{segment}"
        else:
            segments.append(segment)
    return [*segments, position.ordinal]


def _is_one_line(place: _Place) -> bool:
    while not place.lines and len(place.below) == 1:
        [place] = place.below.values()
    return len(place.lines) == 1 and not place.below


def _mark(activity: ActivityLine, is_replayed: bool) -> tuple[str, str]:
    if is_replayed:
        return "·", "dim"
    if activity.outcome == "completed":
        return "✓", "green"
    return ("✗", "red") if activity.outcome is not None else ("…", "yellow")
