"""The demo: agents and workflows whose worker processes are killed, and which still do everything exactly once.

agent.py and model.py (a purchase agent), research.py (a deep agent, `--deep`) and procurement.py (approvals, `--procurement`) are what a user of the
library writes. shop.py and supplier.py are the outside world, which keeps its own account of what was done to it. worker.py is the process that is
killed; story.py, deep_story.py and procurement_story.py do the killing, with what telling.py and workers.py give to all of them; they and proof.py
compare the outside world's account with the history in MongoDB.
"""
