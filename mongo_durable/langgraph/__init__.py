"""The LangGraph adapter: the only layer that imports langgraph and langchain.

From the outside in: `app` (what users hold), `driver` (one attempt's loop), `topology` (what is refused before it starts), `models`, `tools`,
`tool_node` (the wrappers), `effects` (the protocol that they share), `isolation` (a body as a graph of its own), `scope` and `scratch` (where an
effect stands), `clock` and `draws` (time and ids that are the same in every attempt), `questions`, `messages`, `codec` (what is stored of
LangChain's objects), `seams` (private behaviour of the frameworks, with a contract test).
"""
