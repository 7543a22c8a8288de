"""Answers in plain LangGraph."""

from __future__ import annotations

from typing import Any

from pydantic_core import to_jsonable_python

from mongo_durable.nodes.interrupt import INTERRUPT_ACK_SENTINEL


def resume_with(answer: Any) -> dict[str, Any]:
    """What to put into `Command(resume=…)` so that any answer reaches an interrupt node or an elicitation node of a plain LangGraph graph.

    LangGraph asks again on `{}`, takes a dict whose keys look like interrupt ids for answers to those, and fails on None. A durable run needs none of
    this, and a response schema there is checked against what is given: give it the answer itself.

    Args:
        answer: Any JSON value; a Pydantic model is dumped.
    """
    return {INTERRUPT_ACK_SENTINEL: {"answer": to_jsonable_python(answer)}}
