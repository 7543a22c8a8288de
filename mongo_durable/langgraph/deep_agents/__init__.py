"""`app.deep_agent`: a deep agent, with every sub-agent that it delegates to, made durable. Needs the extra `mongo_durable[deepagents]`.

What makes one deep agent different from any other graph, and where it is taken care of:

- **Where a sub-agent stands** (`delegation`). The model orders `task(research), task(research)`; workers start in any order. The order is taken from
  the model's response, every ordinal of the batch is given before any worker runs, and what a sub-agent does stands under `agent/1/research/1`,
  `agent/1/research/2`, however deep it delegates.
- **Message ids** (`identity`). LangChain invents them anew in each attempt. Here they derive from tool calls, are set on copies, and never collide.
- **Effects** (`building`, `middleware`, `backends`). Models, tools and backends (file system, shell, store, sandbox) are recorded, in the root and in
  every sub-agent. Files that live in the agent's state are no effects.
- **Randomness and clocks** (`draws`) inside deepagents: values that reach a model's input are the same in every attempt.
- **Private behaviour** (`seams`) of deepagents, with the versions that it was proven on and a contract test.

What cannot be made durable is refused when the agent is made, by name: see `building`.
"""
