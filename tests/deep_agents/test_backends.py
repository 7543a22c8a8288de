"""What a deep agent does to file systems, shells, stores and sandboxes is recorded once."""

from __future__ import annotations

import random
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
from deepagents.backends import CompositeBackend, FilesystemBackend, LocalShellBackend, StateBackend, StoreBackend
from deepagents.backends.protocol import ExecuteResponse, FileDownloadResponse, FileUploadResponse
from deepagents.backends.sandbox import BaseSandbox
from langchain_core.messages import AIMessage
from langgraph.store.memory import InMemoryStore
from langgraph.types import Command

from mongo_durable.errors import AttemptOver
from mongo_durable.protocol.events import EventType
from tests.deep_agents.kit import (
    HELLO,
    Inputs,
    Say,
    call,
    in_turn,
    order,
    researcher,
    run,
    speaker,
    subagent,
    task,
)
from tests.deep_agents.test_effects import completed
from tests.deep_agents.test_kill_matrix import At
from tests.deep_agents.test_paths import COLOURS
from tests.langgraph.bench import Bench, Colour, Make
from tests.langgraph.kit import Kit, Ledger, answer


def file_worker(*last: Any) -> Say:
    """A sub-agent that writes, edits and reads a file of its own."""
    return in_turn(
        lambda asked: order(call("write_file", "w", file_path=f"/work/{asked}.md", content=f"about {asked}\n")),
        lambda asked: order(call("edit_file", "e", file_path=f"/work/{asked}.md", old_string="about", new_string="on"), *last),
        lambda asked: order(
            call("read_file", "r", file_path=f"/work/{asked}.md"), call("ls", "l", path="/work"), call("grep", "g", pattern=asked, path="/work")
        ),
        lambda asked: AIMessage(f"wrote {asked}"),
    )


def workers(backend: Any, say: Say, *names: str, **options: Any) -> Make:
    """A root with sub-agents that work on a backend."""

    def make(kit: Kit) -> Any:
        root = in_turn(order(*(task(name, "worker") for name in names)), AIMessage("done"))
        return kit.app.deep_agent(
            model=speaker(kit, "root", root), tools=kit.tools, backend=backend, subagents=[subagent(kit, "worker", say)], **options
        )

    return make


class CountingFiles(FilesystemBackend):
    """A file system that counts what is done to it."""

    done: ClassVar[Counter[str]] = Counter()

    def write(self, file_path: str, content: str) -> Any:
        self.done[f"write {file_path}"] += 1
        return super().write(file_path, content)

    def edit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> Any:
        self.done[f"edit {file_path}"] += 1
        return super().edit(file_path, old_string, new_string, replace_all)


@pytest.mark.parametrize("colour", COLOURS)
def test_a_file_system_is_changed_once(bench: Bench, inputs: Inputs, tmp_path: Path, colour: Colour) -> None:
    """Files on a disk: each operation is recorded, runs once, and what was read stays read, whatever happens to the file later."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "given.md").write_text("first\n")
    CountingFiles.done.clear()
    backend = CountingFiles(root_dir=tmp_path, virtual_mode=True)
    make = workers(backend, file_worker(call("read_file", "g", file_path="/work/given.md"), call("ask", "a", q="go on?")), "A", "B")

    def say(question: Any) -> Any:
        (tmp_path / "work" / "given.md").write_text("changed\n")
        return answer(question)

    told = run(bench, make, colour, say=say)
    assert told.attempts == 2
    assert CountingFiles.done == {f"{what} /work/{name}.md": 1 for what in ("write", "edit") for name in "AB"}
    assert completed(told) >= Counter({"CountingFiles.write": 2, "CountingFiles.edit": 2, "CountingFiles.read": 4, "CountingFiles.ls": 2})
    assert "on A\n" in (tmp_path / "work" / "A.md").read_text()
    assert not hasattr(backend, "_durable_inner")


@pytest.mark.parametrize("colour", COLOURS)
def test_a_file_system_under_crashes(bench: Bench, inputs: Inputs, tmp_path: Path, colour: Colour) -> None:
    """Operations that may be done again are; an edit whose process died is asked about; recorded ones never run again."""
    asked: list[Any] = []
    for point in range(5, 90, 28):
        CountingFiles.done.clear()
        root = tmp_path / str(point)
        (root / "work").mkdir(parents=True)

        def look(question: Any, root: Path = root) -> Any:
            """A person who looks into the file."""
            asked.append(question)
            edit = question["input"]
            if edit["new_string"] not in (root / edit["file_path"].lstrip("/")).read_text():
                return {"verdict": "rerun"}
            return {"verdict": "completed", "result": {"path": edit["file_path"], "occurrences": 1}}

        backend = CountingFiles(root_dir=root, virtual_mode=True)
        run(bench, workers(backend, file_worker(), "A", "B"), colour, say=look, killer=At(point), order=random.Random(point))
        for name in "AB":
            assert (root / "work" / f"{name}.md").read_text() == f"on {name}\n"
            assert CountingFiles.done[f"edit /work/{name}.md"] == 1
    assert all(question["name"] == "CountingFiles.edit" for question in asked)


@pytest.mark.parametrize("colour", COLOURS)
def test_a_shell_command_runs_once(bench: Bench, inputs: Inputs, tmp_path: Path, colour: Colour) -> None:
    """A command of a shell backend is recorded; if a process died in it, a person is asked and what he saw is its output."""
    backend = LocalShellBackend(root_dir=tmp_path, virtual_mode=True)
    say = in_turn(
        lambda asked: order(call("execute", "x", command=f"echo {asked} >> {tmp_path}/log; echo ran {asked}")),
        lambda asked: order(call("ask", "a", q="well?")),
        lambda asked: AIMessage("ran"),
    )
    told = run(bench, workers(backend, say, "A", "B"), colour)
    assert told.attempts == 2
    assert sorted((tmp_path / "log").read_text().split()) == ["A", "B"]
    assert completed(told)["LocalShellBackend.execute"] == 2

    died, run_id = _DiesIn(root_dir=tmp_path, virtual_mode=True), bench.new_run()
    config = {"configurable": {"thread_id": run_id}}
    make = workers(died, say, "C")
    with pytest.raises(AttemptOver):
        bench.once(bench.built(make, Ledger(), colour), colour, HELLO, config, run_id=run_id)
    out = bench.once(bench.built(make, Ledger(), colour), colour, HELLO, config, run_id=run_id)
    [question] = out["__interrupt__"]
    assert question.value["name"] == "_DiesIn.execute"
    assert "echo C" in question.value["input"]["command"]
    verdict = {"verdict": "completed", "result": "ran C, I saw it"}
    bench.once(bench.built(make, Ledger(), colour), colour, Command(resume={question.id: verdict}), config, run_id=run_id)
    [outcome] = [each for each in bench.told(run_id, {}).events if each.name == "_DiesIn.execute" and each.type is EventType.ACTIVITY_COMPLETED]
    assert "I saw it" in str(outcome.value)
    assert (tmp_path / "log").read_text().split().count("C") == 1


class _DiesIn(LocalShellBackend):
    """Its process dies after the command, before anything is recorded."""

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        super().execute(command, timeout=timeout)
        raise AttemptOver("died in the command")


@pytest.mark.parametrize("colour", COLOURS)
def test_a_store(bench: Bench, inputs: Inputs, colour: Colour) -> None:
    """A LangGraph store is outside the run: what is read of it stays read, and it is written once."""
    store = InMemoryStore()
    backend = StoreBackend(namespace=lambda _: ("files",))
    told = run(bench, workers(backend, file_worker(call("ask", "a", q="?")), "A", "B", store=store), colour)
    assert completed(told) >= Counter({"StoreBackend.write": 2, "StoreBackend.edit": 2, "StoreBackend.ls": 2})
    assert {item.key for item in store.search(("files",))} == {"/work/A.md", "/work/B.md"}


@pytest.mark.parametrize("colour", COLOURS)
def test_a_composite(bench: Bench, inputs: Inputs, tmp_path: Path, colour: Colour) -> None:
    """Of a composite, routes that lead outside are recorded; files in the state are part of the state."""
    backend = CompositeBackend(default=StateBackend(), routes={"/work/": CountingFiles(root_dir=tmp_path, virtual_mode=True)})
    say = in_turn(
        lambda asked: order(
            call("write_file", "w", file_path=f"/work/{asked}.md", content=asked), call("write_file", "s", file_path=f"/{asked}", content=asked)
        ),
        lambda asked: order(call("ls", "l", path="/"), call("ask", "a", q="?")),
        lambda asked: AIMessage("wrote"),
    )
    told = run(bench, workers(backend, say, "A", "B"), colour)
    assert completed(told)["CountingFiles.write"] == 2
    assert set(told.state["files"]) == {"/A", "/B"}
    assert {each.name for each in tmp_path.iterdir()} == {"A.md", "B.md"}


class Box(BaseSandbox):
    """A sandbox: a directory and a shell in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.commands: list[str] = []

    @property
    def id(self) -> str:
        return "box"

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        self.commands.append(command)
        done = subprocess.run(["bash", "-c", command], cwd=self.root, capture_output=True, text=True, check=False)
        return ExecuteResponse(output=done.stdout + done.stderr, exit_code=done.returncode, truncated=False)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        for path, content in files:
            Path(path).write_bytes(content)
        return [FileUploadResponse(path=path, error=None) for path, _ in files]

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return [FileDownloadResponse(path=path, content=Path(path).read_bytes(), error=None) for path in paths]


@pytest.mark.parametrize("colour", COLOURS)
def test_a_sandbox(bench: Bench, inputs: Inputs, tmp_path: Path, colour: Colour) -> None:
    """A sandbox's operations are single activities, although each is made of commands, with random names in them; none runs in a replay."""
    box = Box(tmp_path)
    say = in_turn(
        lambda asked: order(call("write_file", "w", file_path=f"{tmp_path}/{asked}", content="a long text")),
        lambda asked: order(call("edit_file", "e", file_path=f"{tmp_path}/{asked}", old_string="long", new_string="short")),
        lambda asked: order(call("execute", "x", command=f"cat {tmp_path}/{asked}")),
        lambda asked: order(call("ask", "a", q="?")),
        lambda asked: AIMessage("done"),
    )
    ran: list[int] = []

    def answered(question: Any) -> Any:
        ran.append(len(box.commands))
        return answer(question)

    told = run(bench, workers(box, say, "A"), colour, say=answered)
    assert completed(told) == Counter({"Box.write": 1, "Box.edit": 1, "Box.execute_with_offload": 1, "act": 2})
    assert ran == [len(box.commands)]
    assert (tmp_path / "A").read_text() == "a short text"


@pytest.mark.parametrize("colour", COLOURS)
def test_memory_and_skills_are_read_once(bench: Bench, inputs: Inputs, tmp_path: Path, colour: Colour) -> None:
    """Memory files and skills that change on the disk while a run waits: its models go on with what was read."""
    (tmp_path / "skills" / "cook").mkdir(parents=True)
    (tmp_path / "skills" / "cook" / "SKILL.md").write_text("---\nname: cook\ndescription: How to cook.\n---\nBoil it.\n")
    (tmp_path / "AGENTS.md").write_text("be brief\n")

    def say(question: Any) -> Any:
        (tmp_path / "AGENTS.md").write_text("be long\n")
        (tmp_path / "skills" / "cook" / "SKILL.md").unlink()
        return answer(question)

    backend = FilesystemBackend(root_dir=tmp_path, virtual_mode=True)
    make = workers(backend, researcher("ask"), "A", memory=["/AGENTS.md"], skills=["/skills/"])
    told = run(bench, make, colour, say=say)
    last = inputs.of(told.events[0].run_id)
    assert all("be brief" in min(given) and "How to cook" in min(given) for position, given in last.items() if position.startswith("agent/1/model@"))


@pytest.mark.parametrize("colour", COLOURS)
def test_a_large_result_moves_to_a_file(bench: Bench, inputs: Inputs, tmp_path: Path, colour: Colour) -> None:
    """A tool's large result, which deepagents moves to the backend, is moved once; a large question likewise, under a name that stays."""

    def make(kit: Kit) -> Any:
        def huge(q: str) -> str:
            """Say much."""
            return "word " * 30_000

        root = in_turn(order(call("huge", "h", q="x"), call("ask", "a", q="?")), AIMessage("done"))
        backend = CountingFiles(root_dir=tmp_path, virtual_mode=True)
        return kit.app.deep_agent(model=speaker(kit, "root", lambda asked, number: root("", number)), tools=[huge, kit.ask], backend=backend)

    CountingFiles.done.clear()
    (tmp_path / "large_tool_results").mkdir()
    (tmp_path / "conversation_history").mkdir()
    run(bench, make, "mixed" if colour == "async" else colour, given={"messages": [("user", "much " * 60_000)]})
    assert sorted(CountingFiles.done.values()) == [1, 1]
    assert "write /large_tool_results/h" in CountingFiles.done
