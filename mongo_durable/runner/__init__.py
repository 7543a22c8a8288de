"""The runner: claims runs that can go on and executes their attempts, in this process."""

from mongo_durable.runner.runner import Runner

__all__ = ["Runner"]
