"""The core: what rides together and when it leaves. Pure, standard library only."""

from .batcher import Batch, Batcher
from .errors import BatchAborted, BusloadError, ResultCountError, ResultEncodeError
from .outcomes import Failed, Outcome, Succeeded, fail_all, match_results
from .pace import Pace
from .policies import NEVER, NOW, GreedyPolicy, Policy, StaticPolicy, make_policy
from .watch import QueueWatch

__all__ = [
    "NEVER",
    "NOW",
    "Batch",
    "BatchAborted",
    "Batcher",
    "BusloadError",
    "Failed",
    "GreedyPolicy",
    "Outcome",
    "Pace",
    "Policy",
    "QueueWatch",
    "ResultCountError",
    "ResultEncodeError",
    "StaticPolicy",
    "Succeeded",
    "fail_all",
    "make_policy",
    "match_results",
]
