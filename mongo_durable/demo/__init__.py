"""The demo: a purchase agent whose worker processes are killed, and which still buys exactly one desk.

agent.py and model.py are what a user of the library writes; shop.py is the outside world, which keeps its own account of what was done to it;
worker.py is the process that is killed; story.py does the killing; proof.py compares the outside world's account with the history in MongoDB.
research.py and deep_story.py are the same with a deep agent (`--deep`).
"""
