"""The endpoint for agents, given to trainers: they meet rollout through workers only."""

from hone.rollout.endpoint import Endpoint
from hone.rollout.sessions import AgentSession, AgentTask

__all__ = ["AgentSession", "AgentTask", "Endpoint"]
