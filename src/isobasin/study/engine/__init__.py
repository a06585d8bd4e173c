"""How the jobs of a study are carried out: one graph, and pools of workers that it is handed to."""

from .attempt import Attempt, attempt
from .graph import Event, Outcome, Pool, Told, work_through

__all__ = ["Attempt", "Event", "Outcome", "Pool", "Told", "attempt", "work_through"]
