"""LangGraph's own checkpointers: they keep the state of a graph, not its effects. And LangChain alone, which keeps nothing."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import AsyncExitStack
from typing import Any

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from scripts.benchmarks.contenders.graphs import PausingModel, answer, chat_graph, llm_graph, ten_nodes
from scripts.benchmarks.crew import Samples
from scripts.benchmarks.servers import Addresses


async def _effect(number: int) -> str:
    return answer(number)


def _sync_effect(number: int) -> str:
    return answer(number)


class Saver:
    """LangGraph with one checkpointer, called in the colour that is the checkpointer's own."""

    is_async = True

    def __init__(self, addresses: Addresses) -> None:
        self._addresses = addresses
        self._database = f"bench_{uuid.uuid4().hex[:16]}"
        self._saver: Any = None

    async def open(self) -> Any:
        """The checkpointer, made on first use."""
        raise NotImplementedError

    async def stored_bytes(self) -> float:
        """What it has stored by now, in bytes."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Drop what was written."""

    async def _compiled(self, graph: Any) -> Any:
        if self._saver is None:
            self._saver = await self.open()
        return graph.compile(checkpointer=self._saver)

    async def _invoke(self, graph: Any, given: Any, config: Any, **options: Any) -> Any:
        if self.is_async:
            return await graph.ainvoke(given, config, **options)
        return await asyncio.to_thread(graph.invoke, given, config, **options)

    async def graph(self, *, times: int, durability: str = "async") -> Samples:
        """The ten nodes from their start over the interrupt to their end."""
        graph = await self._compiled(ten_nodes(_effect if self.is_async else _sync_effect, is_async=self.is_async))
        taken = []
        for _ in range(times + 1):
            config = {"configurable": {"thread_id": uuid.uuid4().hex}}
            started = time.perf_counter()
            asked = await self._invoke(graph, {"log": []}, config, durability=durability)
            assert asked["__interrupt__"]
            ended = await self._invoke(graph, Command(resume={"approved": True}), config, durability=durability)
            assert len(ended["log"]) == 10
            taken.append((time.perf_counter() - started) * 1e3)
        return {"time": taken[1:]}

    async def turns(self, *, turns: int, characters: int) -> Samples:
        """A conversation: its bytes after half of the turns, and what was added by the rest."""
        graph = await self._compiled(chat_graph(PausingModel(0, characters), is_async=self.is_async))
        config = {"configurable": {"thread_id": uuid.uuid4().hex}}
        before, sizes = await self.stored_bytes(), []
        for half in (turns // 2, turns - turns // 2):
            for _ in range(half):
                await self._invoke(graph, {"messages": [("human", "x" * characters)]}, config)
            sizes.append(await self.stored_bytes())
        first, second = sizes[0] - before, sizes[1] - sizes[0]
        return {"whole": [(first + second) / 1e3], "growth": [second / first]}


class InMemory(Saver):
    """Keeps everything in this process: what LangGraph itself takes."""

    async def open(self) -> Any:
        return InMemorySaver()

    async def llm(self, *, calls: int, pause_s: float, characters: int) -> Samples:
        """Model calls that nobody records: what LangChain itself takes."""
        model = PausingModel(pause_s, characters)
        samples: Samples = {"overhead": [], "whole call": []}
        await llm_graph(model, model, calls, samples).compile().ainvoke({})
        return samples


class OnMongoDB(Saver):
    """`MongoDBSaver`. Its async methods run its sync ones in threads, so sync is its own colour."""

    is_async = False

    async def open(self) -> Any:
        from langgraph.checkpoint.mongodb import MongoDBSaver
        from pymongo import MongoClient

        self._client: MongoClient[dict[str, Any]] = MongoClient(self._addresses.mongodb)
        return await asyncio.to_thread(MongoDBSaver, self._client, self._database)

    async def stored_bytes(self) -> float:
        def total() -> float:
            stages = [{"$group": {"_id": None, "bytes": {"$sum": {"$bsonSize": "$$ROOT"}}}}]
            database = self._client[self._database]
            return sum(each["bytes"] for name in database.list_collection_names() for each in database[name].aggregate(stages))

        return await asyncio.to_thread(total)

    async def aclose(self) -> None:
        if self._saver is not None:
            await asyncio.to_thread(self._client.drop_database, self._database)
            self._client.close()


class OnPostgres(Saver):
    """`AsyncPostgresSaver`, on one connection, as its documentation shows it. Its database goes with the server."""

    def __init__(self, addresses: Addresses) -> None:
        super().__init__(addresses)
        self._stack = AsyncExitStack()

    async def open(self) -> Any:
        from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
        from psycopg import AsyncConnection

        async with await AsyncConnection.connect(f"{self._addresses.postgres}/postgres", autocommit=True) as administration:
            await administration.execute(f'CREATE DATABASE "{self._database}"')  # type: ignore[arg-type]
        url = f"{self._addresses.postgres}/{self._database}"
        saver = await self._stack.enter_async_context(AsyncPostgresSaver.from_conn_string(url))
        await saver.setup()
        return saver

    async def stored_bytes(self) -> float:
        total = 0.0
        for table in ("checkpoints", "checkpoint_blobs", "checkpoint_writes"):
            cursor = await self._saver.conn.execute(f"SELECT coalesce(sum(octet_length(t::text)), 0) AS bytes FROM {table} t")
            total += float((await cursor.fetchone())["bytes"])
        return total

    async def aclose(self) -> None:
        await self._stack.aclose()
