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
from fanout_procrastinate.managers import Manager
from fanout_procrastinate.models import (
    ErrorGroup,
    Finding,
    FindingKind,
    Item,
    ItemStatus,
    Progress,
    RunStatus,
    SweepReport,
)
from fanout_procrastinate.outcomes import Backoff
from fanout_procrastinate.run import Run
from fanout_procrastinate.settings import Settings

__all__ = [
    "Backoff",
    "Child",
    "ChildProcessDied",
    "ConfigurationError",
    "DatabaseError",
    "ErrorGroup",
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
    "Manager",
    "PermanentError",
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
    "SweepReport",
    "TransientError",
    "WaitTimeout",
    "fanout_child",
    "fanout_manager",
]
