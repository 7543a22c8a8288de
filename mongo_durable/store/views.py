"""The views that people look at in mongosh: what waits for an answer, what happened, what does not go on.

Whoever may `find` on a view needs no rights on the collections behind it. Every `$lookup` goes through an index: by `_id`, backwards through the
events of one run, or once for the whole view. The text of an age or a duration is the server's; nothing is decided by a view.
"""

from __future__ import annotations

from typing import Any

from mongo_durable.protocol.events import ENDS, OUTCOMES, EventType, FrontierStatus, RunStatus

Expression = Any

_STARTED_WITHIN = 500
"""How many events back the start of an activity is looked for: in a run that does more at once, its duration is left out."""
_SHOWN_BYTES = 2000
"""Bytes of BSON up to which the timeline shows a value."""


def length(milliseconds: Expression) -> Expression:
    """A duration for people, in the words of the command line."""
    whole = [(120_000, 1000, "s"), (7_200_000, 60_000, "min"), (172_800_000, 3_600_000, "h")]
    ms = "$$ms"
    branches = [{"case": {"$lt": [ms, 1000]}, "then": _text({"$toString": ms}, " ms")}]
    branches += [
        {"case": {"$lt": [ms, limit]}, "then": _text({"$toString": {"$round": [{"$divide": [ms, unit]}, 1 if name == "s" else 0]}}, f" {name}")}
        for limit, unit, name in whole
    ]
    days = _text({"$toString": {"$round": [{"$divide": [ms, 86_400_000]}, 0]}}, " d")
    # A writer's clock may be set back between two events.
    return {"$let": {"vars": {"ms": {"$max": [milliseconds, {"$toLong": 0}]}}, "in": {"$switch": {"branches": branches, "default": days}}}}


def _since(moment: Expression) -> Expression:
    return {"$subtract": ["$$NOW", moment]}


def _text(*parts: Expression) -> Expression:
    return {"$concat": list(parts)}


def _moment(date: Expression) -> Expression:
    return {"$dateToString": {"date": date, "format": "%Y-%m-%d %H:%M:%SZ"}}


def _if(condition: Expression, then: Expression, otherwise: Expression) -> Expression:
    return {"$cond": [condition, then, otherwise]}


def _replaced(text: Expression, *pairs: tuple[str, str]) -> Expression:
    for found, replacement in pairs:
        text = {"$replaceAll": {"input": text, "find": found, "replacement": replacement}}
    return text


def _in_javascript(text: Expression) -> Expression:
    return _text('"', _replaced(text, ("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n")), '"')


def _in_shell(text: Expression) -> Expression:
    is_plain = {"$regexMatch": {"input": text, "regex": "^[A-Za-z0-9_.:@/][A-Za-z0-9_.:@/-]*$"}}
    return _if(is_plain, text, _text("'", _replaced(text, ("'", "'\\''")), "'"))


def _each_entry(text: Expression) -> Expression:
    """`text` for every entry of a frontier, one after the other."""
    return {"$reduce": {"input": "$entries", "initialValue": "", "in": _text("$$value", text)}}


def _shown(value: str) -> Expression:
    """A value as it is stored, or, where it is stored apart, how large it is."""
    is_apart = {"$eq": [{"$cond": [{"$eq": [{"$type": value}, "object"]}, f"{value}.__type__", None]}, "payload"]}
    size = {"$toString": {"$ceil": {"$divide": [{"$ifNull": [f"{value}.value.size", 0]}, 1000]}}}
    return _if(is_apart, _text("(", size, " kB, stored apart)"), value)


def _live_runners() -> dict[str, Any]:
    """Which workflows are served. It is about no document, so the server asks once for the whole view."""
    serving = {"state": "live", "serves": {"$type": "object"}, "$expr": {"$gt": ["$expires_at", "$$NOW"]}}
    pipeline: list[dict[str, Any]] = [{"$match": serving}, {"$unwind": "$serves"}]
    pipeline += [{"$group": {"_id": {"name": "$serves.name", "version": "$serves.version"}}}]
    return {"$lookup": {"from": "runners", "pipeline": pipeline, "as": "served"}}


def _by_id(collection: str, key: Expression, name: str, shown: dict[str, Any]) -> list[dict[str, Any]]:
    """The document of a collection whose `_id` is `key`, or nothing."""
    lookup = {"from": collection, "localField": "_key", "foreignField": "_id", "pipeline": [{"$project": shown}], "as": name}
    return [{"$set": {"_key": key}}, {"$lookup": lookup}, {"$set": {name: {"$first": f"${name}"}}}]


OPEN_FRONTIERS: list[dict[str, Any]] = [
    {"$match": {"status": FrontierStatus.OPEN.value}},
    {"$sort": {"opened_at": 1}},
    # All questions of a frontier are answered at once, so each row says the whole answer.
    {
        "$set": {
            "_mongosh": _if(
                {"$eq": [{"$size": "$entries"}, 1]},
                _text("durable.answer(", _in_javascript("$run_id"), ", <answer>)"),
                _text("durable.resolve(", _in_javascript("$run_id"), ", {", _each_entry(_text("$$this.activity_id", ": <answer>, ")), "})"),
            ),
            "_shell": _text("mongo-durable resolve ", _in_shell("$run_id"), _each_entry(_text(" --answer '", "$$this.activity_id", "=<json>'"))),
        }
    },
    {"$unwind": "$entries"},
    {
        "$project": {
            "_id": 0,
            "run": "$run_id",
            "workflow": "$workflow",
            "age": length(_since("$opened_at")),
            "name": "$entries.name",
            "question": _shown("$entries.value"),
            "activity_id": "$entries.activity_id",
            "position": "$entries.position",
            "expires_at": {"$ifNull": ["$entries.expires_at", "$$REMOVE"]},
            "answer_in_mongosh": _replaced("$_mongosh", (", })", "})")),
            "answer_in_shell": "$_shell",
            "generation": "$generation",
            "digest": "$digest",
        }
    },
]


def _began() -> list[dict[str, Any]]:
    """When that began which an event ends: an activity, an attempt, the wait for an answer."""
    ends_attempt = [EventType.ACTIVITIES_SUSPENDED, EventType.RUN_COMPLETED, EventType.RUN_FAILED, EventType.RUN_DIVERGED]
    ends_wait = [EventType.ACTIVITIES_RESOLVED, EventType.FRONTIER_EXPIRED]
    wanted = {
        "$switch": {
            "branches": [
                {"case": {"$in": ["$type", sorted(OUTCOMES)]}, "then": EventType.ACTIVITY_STARTED.value},
                {"case": {"$in": ["$type", [each.value for each in ends_attempt]]}, "then": EventType.ATTEMPT_STARTED.value},
                {"case": {"$in": ["$type", [each.value for each in ends_wait]]}, "then": EventType.ACTIVITIES_SUSPENDED.value},
            ],
            "default": None,
        }
    }
    is_activity = {"$in": ["$type", sorted(OUTCOMES)]}
    bounds = {
        "run": _if({"$eq": ["$_wanted", None]}, None, "$run_id"),
        "from": {"$subtract": ["$seq", _if(is_activity, _STARTED_WITHIN, "$seq")]},
        "to": "$seq",
        "type": "$_wanted",
        "activity": _if(is_activity, "$activity_id", None),
    }
    begun = {
        "$expr": {
            "$and": [
                {"$eq": ["$run_id", "$$run"]},
                {"$gte": ["$seq", "$$from"]},
                {"$lt": ["$seq", "$$to"]},
                {"$eq": ["$type", "$$type"]},
                {"$or": [{"$eq": ["$$activity", None]}, {"$eq": ["$activity_id", "$$activity"]}]},
            ]
        }
    }
    pipeline = [{"$match": begun}, {"$sort": {"seq": -1}}, {"$limit": 1}, {"$project": {"_id": 0, "at": 1, "kind": 1, "name": 1}}]
    lookup = {"$lookup": {"from": "activity_events", "let": bounds, "pipeline": pipeline, "as": "_began"}}
    return [{"$set": {"_wanted": wanted}}, lookup, {"$set": {"_began": {"$first": "$_began"}}}]


def _what() -> Expression:
    """What an event is about, in one line."""

    def named(field: str, otherwise: str = "") -> Expression:
        return {"$ifNull": [field, otherwise]}

    activity = {"$in": ["$type", [EventType.ACTIVITY_STARTED.value, *sorted(OUTCOMES)]]}
    kind, name = {"$ifNull": ["$kind", "$_began.kind", ""]}, {"$ifNull": ["$name", "$_began.name", ""]}
    error = _if({"$eq": [{"$type": "$error"}, "object"]}, _text(named("$error.type", "?"), ": ", named("$error.message")), "")
    names = {"$reduce": {"input": {"$ifNull": ["$entries", []]}, "initialValue": "asks", "in": _text("$$value", " ", named("$$this.name"))}}
    by = _if({"$eq": [{"$type": "$resolved_by"}, "string"]}, _text("by ", "$resolved_by", " "), "")
    note = _if({"$eq": [{"$type": "$note"}, "string"]}, _text("“", "$note", "”"), "")
    branches = [
        (activity, _text(kind, " ", name, " ", named("$position"), " ", error)),
        ({"$eq": ["$type", EventType.RUN_SUBMITTED.value]}, _text(named("$workflow.name"), " ", named("$workflow.version"))),
        ({"$eq": ["$type", EventType.ATTEMPT_STARTED.value]}, _text("process ", named("$owner", "?"))),
        ({"$eq": ["$type", EventType.STEP_COMMITTED.value]}, _text("step ", {"$toString": "$step"})),
        ({"$eq": ["$type", EventType.ACTIVITIES_SUSPENDED.value]}, names),
        ({"$eq": ["$type", EventType.ACTIVITIES_RESOLVED.value]}, _text(by, note)),
        ({"$in": ["$type", sorted(ENDS)]}, _text(error, _if({"$eq": [{"$type": "$reason"}, "string"]}, "$reason", ""))),
    ]
    switch = {"$switch": {"branches": [{"case": case, "then": then} for case, then in branches], "default": ""}}
    return {"$trim": {"input": switch}}


def _small(value: str) -> Expression:
    """A value where it is small; how large it is, where not; nothing, where there is none."""
    size = {"$bsonSize": {"v": value}}
    large = _text("(", {"$toString": {"$ceil": {"$divide": [size, 1000]}}}, " kB)")
    return _if({"$eq": [{"$type": value}, "missing"]}, "$$REMOVE", _if({"$gt": [size, _SHOWN_BYTES]}, large, _shown(value)))


RUN_TIMELINE: list[dict[str, Any]] = [
    {"$sort": {"run_id": 1, "seq": 1}},
    *_began(),
    {
        "$project": {
            "_id": 0,
            "run": "$run_id",
            "seq": "$seq",
            "at": "$at",
            "attempt": "$fence",
            "event": "$type",
            "what": _what(),
            "how_long": _if({"$eq": [{"$type": "$_began.at"}, "date"]}, length({"$subtract": ["$at", "$_began.at"]}), "$$REMOVE"),
            "value": _small("$value"),
            "answers": _small("$answers"),
            "activity_id": "$activity_id",
        }
    },
]


def _why() -> list[tuple[Expression, Expression, Expression]]:
    """What can be wrong with a run that has not ended: the condition, since when, and why. The first that holds is shown."""
    status = {each: {"$eq": ["$status", each.value]} for each in RunStatus}
    waiting = {"$in": ["$status", [RunStatus.PENDING.value, RunStatus.READY.value]]}
    due = {"$and": [waiting, {"$lte": ["$available_at", "$$NOW"]}, {"$ne": ["$is_queued", True]}]}
    version = _text("$workflow.name", " ", "$workflow.version")
    generation = {"$toString": "$generation"}

    def running_and(*conditions: Expression) -> Expression:
        return {"$and": [status[RunStatus.RUNNING], *conditions]}

    def suspended_and(*conditions: Expression) -> Expression:
        return {"$and": [status[RunStatus.SUSPENDED], *conditions]}

    return [
        (
            {"$and": [{"$gt": ["$deadline_at", None]}, {"$lte": ["$deadline_at", "$$NOW"]}]},
            "$deadline_at",
            _text("it is past its deadline: a runner has to end it, and none does"),
        ),
        (
            running_and({"$eq": [{"$type": "$_runner"}, "missing"]}),
            "$claimed_at",
            _text("its process ", "$owner", " has vanished: a runner that serves ", version, " has to take it over"),
        ),
        (
            running_and({"$eq": ["$_runner.state", "dead"]}),
            "$_runner.expires_at",
            _text("its process ", "$owner", " is dead: a runner that serves ", version, " has to take it over"),
        ),
        (
            running_and({"$lte": ["$_runner.expires_at", "$$NOW"]}),
            "$_runner.expires_at",
            _text("the lease of its process ", "$owner", " has run out: a runner that serves ", version, " has to take it over"),
        ),
        (
            suspended_and({"$eq": [{"$type": "$_frontier"}, "missing"]}),
            "$suspended_at",
            _text("it waits on frontier ", generation, ", and there is none: nothing can answer it"),
        ),
        (
            suspended_and({"$ne": ["$_frontier.status", FrontierStatus.OPEN.value]}),
            "$suspended_at",
            _text("it waits on frontier ", generation, ", which is ", "$_frontier.status", ": somebody has changed one of the two by hand"),
        ),
        (
            suspended_and({"$ne": [{"$type": "$_resolution"}, "missing"]}),
            "$suspended_at",
            _text("frontier ", generation, " is open, and a resolution stands beside it: somebody has inserted it by hand; remove it, and answer"),
        ),
        (
            suspended_and({"$gt": ["$_frontier.expires_at", None]}, {"$lte": ["$_frontier.expires_at", "$$NOW"]}),
            "$_frontier.expires_at",
            _text("frontier ", generation, " is past its deadline: a runner has to close it, and none does"),
        ),
        (
            {"$and": [waiting, {"$gt": ["$troubles", 0]}, {"$eq": [{"$type": "$held_back"}, "string"]}]},
            "$available_at",
            _text("held back until ", _moment("$available_at"), ": ", "$held_back"),
        ),
        (
            {"$and": [due, {"$not": {"$in": [{"name": "$workflow.name", "version": "$workflow.version"}, "$served._id"]}}]},
            "$available_at",
            _text("no live runner serves ", version),
        ),
    ]


def _first_of(index: int) -> Expression:
    return {"$switch": {"branches": [{"case": each[0], "then": each[index]} for each in _why()], "default": None}}


STUCK_RUNS: list[dict[str, Any]] = [
    {"$match": {"status": {"$in": [each.value for each in RunStatus if not each.is_end]}}},
    *_by_id("runners", _if({"$eq": ["$status", RunStatus.RUNNING.value]}, "$owner", None), "_runner", {"state": 1, "expires_at": 1}),
    *_by_id(
        "frontiers",
        _if({"$eq": ["$status", RunStatus.SUSPENDED.value]}, _text("$_id", "/", {"$toString": "$generation"}), None),
        "_frontier",
        {"status": 1, "expires_at": 1},
    ),
    *_by_id("resolutions", "$_key", "_resolution", {"at": 1}),
    _live_runners(),
    {"$set": {"_since": _first_of(1), "_why": _first_of(2)}},
    {"$match": {"_why": {"$ne": None}}},
    {"$sort": {"_since": 1}},
    {
        "$project": {
            "_id": 0,
            "run": "$_id",
            "workflow": _text("$workflow.name", " ", "$workflow.version"),
            "status": "$status",
            "since": "$_since",
            "age": length(_since({"$ifNull": ["$_since", "$$NOW"]})),
            "why": "$_why",
        }
    },
]

VIEWS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "open_frontiers": ("frontiers", OPEN_FRONTIERS),
    "run_timeline": ("activity_events", RUN_TIMELINE),
    "stuck_runs": ("runs", STUCK_RUNS),
}
