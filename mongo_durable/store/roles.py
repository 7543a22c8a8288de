"""Who may do what: the custom roles of the product, from one table. `schema.ensure_roles` makes them; `docker/` and `scripts/atlas/` are generated.

    viewer     looks at everything: list, show, history, transcripts, `doctor`
    approver   a viewer who answers questions, at once or in drafts, and cancels and retries runs
    submitter  a viewer who starts runs, and cancels and retries them
    runner     executes runs, and does all that an App does in LangGraph's shape: submit, answer, fork
    janitor    removes what has ended

A user may have several. Nobody but an admin creates collections, indexes or validators; nobody changes an event or a resolution, and only the janitor
removes one: MongoDB itself keeps them append-only.

A role is for whole documents: whoever may insert events could forge one by hand. Roles keep the wrong program, and a person with the right one, from
doing harm; they do not make a stolen password harmless.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

ROLES: Final = ("viewer", "approver", "submitter", "runner", "janitor")

# Collection or view -> role -> actions. What a role is not named for, it may not touch.
TABLE: Final[dict[str, dict[str, str]]] = {
    "runs": {
        "viewer": "find changeStream",
        "approver": "find changeStream update",
        "submitter": "find changeStream insert update",
        "runner": "find changeStream insert update",
        "janitor": "find update remove",  # what it removes, it marks first
    },
    "activity_events": {
        "viewer": "find",
        "approver": "find insert",
        "submitter": "find insert",
        "runner": "find insert",
        "janitor": "find remove",
    },
    "frontiers": {
        "viewer": "find",
        "approver": "find update",
        "submitter": "find update",  # cancelling a suspended run closes its frontier
        "runner": "find insert update",
        "janitor": "find remove",
    },
    "resolutions": {
        "viewer": "find",
        "approver": "find insert",
        "submitter": "find",
        "runner": "find insert",  # an App answers with Command(resume=…), and forks
        "janitor": "find remove",
    },
    "drafts": {
        "viewer": "find",
        "approver": "find insert update",
        "submitter": "find",
        "janitor": "find remove",
    },
    # Not the janitor's either: what was refused stays on record.
    "audit": {"viewer": "find", "approver": "find insert", "submitter": "find", "runner": "insert"},
    "threads": {
        "viewer": "find",
        "approver": "find update",  # a run that ends frees its thread
        "submitter": "find insert update",
        "runner": "find insert update",
        "janitor": "find remove",
    },
    "thread_states": {"viewer": "find", "approver": "find", "submitter": "find", "runner": "find insert update", "janitor": "find remove"},
    "memory": {
        "viewer": "find",
        "approver": "find insert",  # cancelling a run that works saves what was said so far
        "submitter": "find insert",
        "runner": "find insert",
        "janitor": "find remove",
    },
    "payloads": {
        "viewer": "find",
        "approver": "find insert",
        "submitter": "find insert",
        "runner": "find insert",
        "janitor": "find remove",
    },
    "runners": {"viewer": "find", "approver": "find", "submitter": "find", "runner": "find insert update", "janitor": "find remove"},
    "meta": {"viewer": "find", "approver": "find", "submitter": "find", "runner": "find", "janitor": "find"},
    "open_frontiers": {"viewer": "find", "approver": "find", "submitter": "find"},
    "run_timeline": {"viewer": "find", "approver": "find", "submitter": "find"},
    "stuck_runs": {"viewer": "find", "approver": "find", "submitter": "find"},
}

_INSPECTORS: Final = ("viewer", "approver", "submitter")
"""Roles of people: they may see which collections, validators and indexes there are, for `doctor`."""


def privileges(role: str, database: str) -> list[dict[str, Any]]:
    """The privileges of one role, as `createRole` takes them."""
    found: list[dict[str, Any]] = []
    if role in _INSPECTORS:
        found.append({"resource": {"db": database, "collection": ""}, "actions": ["listCollections", "listIndexes"]})
    for collection, roles in TABLE.items():
        if role in roles:
            found.append({"resource": {"db": database, "collection": collection}, "actions": roles[role].split()})
    return found


def roles_allowing(action: str, collection: str) -> Sequence[str]:
    """The roles that may do `action` on a collection, the weakest first. None for what only an admin does."""
    return [role for role in ROLES if action in TABLE.get(collection, {}).get(role, "").split()]
