"""What those who watch a fleet get to see: spans, metrics, fields of log records."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from langgraph.types import Command, interrupt
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from mongo_durable import App, DurableClient, Runner, telemetry
from mongo_durable.cli.output import JsonLines
from tests.engine.workflows import PATIENCE_S, State, one_node, until_known


class Watch:
    """What has been exported since the test began."""

    def __init__(self) -> None:
        self.spans = InMemorySpanExporter()
        self.reader = InMemoryMetricReader()

    def metrics(self) -> dict[str, list[tuple[dict[str, Any], Any]]]:
        """Attributes and value (a count, or the number of values) of each data point, by metric."""
        found: dict[str, list[tuple[dict[str, Any], Any]]] = {}
        data = self.reader.get_metrics_data()
        for resource in data.resource_metrics if data is not None else ():
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    points = [(dict(point.attributes), getattr(point, "count", None) or point.value) for point in metric.data.data_points]
                    found.setdefault(metric.name, []).extend(points)
        return found


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Providers of this test's own, in the place of the process's."""
    made = Watch()
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(made.spans))
    meters = MeterProvider(metric_readers=[made.reader])
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: tracers)
    monkeypatch.setattr(trace, "get_tracer", lambda name: tracers.get_tracer(name))
    monkeypatch.setattr(metrics, "get_meter", lambda name: meters.get_meter(name))
    cached = (telemetry._meter, telemetry._tracer, telemetry._counter, telemetry._histogram)
    for each in cached:
        each.cache_clear()
    yield made
    for each in cached:
        each.cache_clear()
    tracers.shutdown()
    meters.shutdown()


async def test_a_tracer_is_noticed_by_the_next_attempt(mongo_uri: str, database: str, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a tracer there are no spans; one that the application sets up later is used from the next attempt on."""
    monkeypatch.setattr(telemetry, "_is_traced", False)
    app = one_node(App("late", uri=mongo_uri, database=database), lambda state: {"value": state["value"]})
    with monkeypatch.context() as before:
        before.setattr(trace, "get_tracer_provider", trace.ProxyTracerProvider)
        await app.ainvoke({"value": 1})
    assert watch.spans.get_finished_spans() == ()
    await app.ainvoke({"value": 2})
    assert [span.name for span in watch.spans.get_finished_spans()] == ["mongo_durable.attempt"]
    await app.aclose()


def shop(app: App) -> App:
    """Two effects and a question between them."""

    @app.activity
    async def quote(value: int) -> int:
        return value

    @app.tool
    async def buy(price: int) -> int:
        """Buy."""
        return price

    async def node(state: State) -> dict[str, Any]:
        price = await quote(7)
        answer = interrupt("may I?")
        return {"seen": [await buy.ainvoke({"price": price}), answer]}

    return one_node(app, node)


async def test_an_attempt_and_its_activities_are_spans_and_are_counted(watch: Watch, mongo_uri: str, database: str) -> None:
    """Each attempt is a span, each executed body one inside it, with run, fence and position; what is replayed is counted and has none."""
    app = shop(App("shop", uri=mongo_uri, database=database))
    config: Any = {"configurable": {"thread_id": "t"}}
    out = await app.ainvoke({"value": 1}, config, run_id="r")
    await app.ainvoke(Command(resume={out["__interrupt__"][0].id: "yes"}), config)
    await app.aclose()
    spans = watch.spans.get_finished_spans()
    attempts = {span.context.span_id: span.attributes for span in spans if span.name == "mongo_durable.attempt" and span.context and span.attributes}
    assert [(found["mongo_durable.run_id"], found["mongo_durable.fence"]) for found in attempts.values()] == [("r", 1), ("r", 2)]
    bodies = [span for span in spans if span.name == "mongo_durable.activity"]
    assert all(span.parent is not None and span.parent.span_id in attempts for span in bodies)
    assert [(span.attributes["mongo_durable.name"], span.attributes["mongo_durable.position"]) for span in bodies if span.attributes] == [
        ("quote", "agent/1/node@1#1"),
        ("buy", "agent/1/node@1#2"),
    ]
    found = watch.metrics()
    activities = {(each["kind"], each["how"]): value for each, value in found["mongo_durable.activities"]}
    # Twice: the second attempt reached it on its way to the question, and again when the node went on with the answer.
    assert activities == {("ACTIVITY", "executed"): 1, ("TOOL", "executed"): 1, ("ACTIVITY", "replayed"): 2}
    assert found["mongo_durable.attempts"] == [({"workflow": "shop"}, 2)]
    assert found["mongo_durable.runs.ended"] == [({"workflow": "shop", "status": "completed"}, 1)]
    assert found["mongo_durable.frontier.age"] == [({"status": "resolved"}, 1)]
    assert found["mongo_durable.append.batch"][0][1] >= 3
    assert sorted((each["kind"], each["outcome"]) for each, _ in found["mongo_durable.activity.duration"]) == [
        ("ACTIVITY", "completed"),
        ("TOOL", "completed"),
    ]


@pytest.mark.parametrize("call", ["invoke", "stream"])
def test_synchronous_graphs_have_the_same_spans(watch: Watch, mongo_uri: str, database: str, call: str) -> None:
    """A graph that runs in threads has its activities inside its attempt's span too."""
    app = App("sync", uri=mongo_uri, database=database)

    @app.activity
    def double(value: int) -> int:
        return 2 * value

    one_node(app, lambda state: {"value": double(state["value"])})
    if call == "invoke":
        assert app.invoke({"value": 1}, run_id="r")["value"] == 2
    else:
        assert list(app.stream({"value": 1}, run_id="r", stream_mode="updates")) == [{"node": {"value": 2}}]
    by_name = {span.name: span for span in watch.spans.get_finished_spans()}
    body, attempt = by_name["mongo_durable.activity"], by_name["mongo_durable.attempt"]
    assert body.parent is not None
    assert attempt.context is not None
    assert body.parent.span_id == attempt.context.span_id


async def test_a_runner_tells_how_old_its_news_is(watch: Watch, mongo_uri: str, database: str) -> None:
    """At each sweep a runner measures how long ago its change stream last gave a sign of life."""
    app = one_node(App("quick", uri=mongo_uri, database=database), lambda _: {})
    async with Runner([app], sweep_interval=timedelta(seconds=0.1)):

        async def is_measured() -> bool:
            return "mongo_durable.stream.lag" in watch.metrics()

        await until_known(is_measured)


async def test_log_records_say_what_they_are_about(mongo_uri: str, database: str, caplog: pytest.LogCaptureFixture) -> None:
    """Run, fence and position are fields of the records, and of the JSON lines that `runner --log-json` writes; values are in none."""
    caplog.set_level(logging.DEBUG, "mongo_durable")
    app = shop(App("shop", uri=mongo_uri, database=database))
    async with DurableClient(mongo_uri, database=database) as client, Runner([app]):
        await (await client.submit("shop", {"value": "a secret"}, run_id="r")).wait(PATIENCE_S)
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records]
    about = Counter((each["run_id"], each.get("fence"), each.get("position")) for each in lines if "run_id" in each)
    assert about["r", 1, None] >= 1
    assert about["r", 1, "agent/1/node@1#1"] == 2
    assert "a secret" not in caplog.text


def test_without_opentelemetry_nothing_is_missed() -> None:
    """Where opentelemetry is not installed, everything works and nothing of it is loaded."""
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from mongo_durable import telemetry\n"
        "assert not telemetry.IS_AVAILABLE\n"
        "telemetry.count('x'); telemetry.measure('y', 1.0)\n"
        "with telemetry.span('z', run_id='r'): pass\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=Path(__file__).parents[2])
