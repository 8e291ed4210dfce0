"""One trigger becomes N independent children on many machines; the last one closes the run."""

from fanout_procrastinate.children import Child
from fanout_procrastinate.context import ItemContext
from fanout_procrastinate.declare import fanout_child, fanout_manager
from fanout_procrastinate.errors import (
    ChildProcessDied,
    ConfigurationError,
    DatabaseError,
    FanoutError,
    InvalidItem,
    InvalidValue,
    ItemTooLarge,
    LimitTimeout,
    PermanentError,
    ResultTooLarge,
    RunClosed,
    RunFailed,
    RunKeyConflict,
    RunNotFound,
    SchemaError,
    TransientError,
    WaitTimeout,
)
from fanout_procrastinate.fanout import FanOut
from fanout_procrastinate.limits import Limit
from fanout_procrastinate.managers import Manager
from fanout_procrastinate.models import (
    ErrorGroup,
    Finding,
    FindingKind,
    Item,
    ItemStatus,
    LimitState,
    LimitUse,
    LimitWant,
    Progress,
    RunStatus,
    SweepReport,
)
from fanout_procrastinate.outcomes import Backoff
from fanout_procrastinate.permits import Permit
from fanout_procrastinate.run import Run
from fanout_procrastinate.settings import Settings
from fanout_procrastinate.subscriptions import Event, Subscription

__all__ = [
    "Backoff",
    "Child",
    "ChildProcessDied",
    "ConfigurationError",
    "DatabaseError",
    "ErrorGroup",
    "Event",
    "FanOut",
    "FanoutError",
    "Finding",
    "FindingKind",
    "InvalidItem",
    "InvalidValue",
    "Item",
    "ItemContext",
    "ItemStatus",
    "ItemTooLarge",
    "Limit",
    "LimitState",
    "LimitTimeout",
    "LimitUse",
    "LimitWant",
    "Manager",
    "PermanentError",
    "Permit",
    "Progress",
    "ResultTooLarge",
    "Run",
    "RunClosed",
    "RunFailed",
    "RunKeyConflict",
    "RunNotFound",
    "RunStatus",
    "SchemaError",
    "Settings",
    "Subscription",
    "SweepReport",
    "TransientError",
    "WaitTimeout",
    "fanout_child",
    "fanout_manager",
]
