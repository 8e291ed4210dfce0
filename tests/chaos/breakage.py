"""What breaks by itself: workers, the server, the network."""

import contextlib
import time
from collections.abc import Callable

import psycopg

from tests.chaos.crew import Berth, Crew
from tests.chaos.plan import Fault
from tests.chaos.stage import Stage
from tests.chaos.workload import Workload


class Breakage:
    """Break the system; each method does one kind of fault, and returns what it has hit."""

    def __init__(self, stage: Stage, crew: Crew, workload: Workload, lease: float) -> None:
        self._stage = stage
        self._crew = crew
        self._workload = workload
        self._lease = lease

    def _berth(self, fault: Fault) -> Berth:
        return fault.dice.choice(self._crew.berths)

    def kill(self, fault: Fault) -> object:
        return self._crew.kill(self._berth(fault))

    def term(self, fault: Fault) -> object:
        return self._crew.term(self._berth(fault))

    def zombie(self, fault: Fault) -> object:
        return self._crew.freeze(self._berth(fault), self._lease * (fault.leases + 1.5))

    # -- the server

    def _terminate(self, share: float, fault: Fault) -> object:
        dice = fault.dice
        rows = self._stage.query(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name <> current_setting('application_name') ORDER BY backend_start"
        )
        chosen = [row["pid"] for row in rows if dice.random() < share]
        self._stage.query(
            "SELECT pg_terminate_backend(pid) FROM unnest(%(pids)s::int[]) pid", pids=chosen
        )
        return chosen

    def terminate_some(self, fault: Fault) -> object:
        return self._terminate(0.2, fault)

    def terminate_all(self, fault: Fault) -> object:
        return self._terminate(1.0, fault)

    def restart_fast(self, fault: Fault) -> object:
        return self._stage.restart("fast", self._lease * fault.leases)

    def restart_immediate(self, fault: Fault) -> object:
        return self._stage.restart("immediate", self._lease * fault.leases)

    def restart_kill(self, fault: Fault) -> object:
        return self._stage.restart("kill", self._lease * fault.leases)

    def _settings(self, fault: Fault, **settings: str) -> object:
        return self._stage.set_for_all(settings, self._lease * fault.leases)

    def read_only(self, fault: Fault) -> object:
        return self._settings(fault, default_transaction_read_only="on")

    def timeouts(self, fault: Fault) -> object:
        return self._settings(fault, statement_timeout="15ms", lock_timeout="5ms")

    def serializable(self, fault: Fault) -> object:
        return self._settings(fault, default_transaction_isolation="serializable")

    def hold_locks(self, fault: Fault) -> object:
        """Lock rows of a run as somebody's long transaction does."""
        runs = self._workload.open_runs()
        table = fault.dice.choice(["fanout_ledgers", "fanout_slots", "fanout_runs"])
        if not runs:
            return None
        key = "id" if table == "fanout_runs" else "run_id"
        held = 0
        # The server may go away meanwhile: then the locks are gone too.
        with (
            contextlib.suppress(psycopg.OperationalError),
            self._stage.connect() as connection,
            connection.transaction(),
        ):
            held = connection.execute(
                f"SELECT FROM {table} WHERE {key} = %s ORDER BY ctid FOR UPDATE",
                [fault.dice.choice(runs)],
            ).rowcount
            time.sleep(self._lease * fault.leases)
        return f"{held} of {table}" if held else None

    # -- the network

    def _chosen(self, fault: Fault) -> Callable[[], bool]:
        dice = fault.dice
        share = dice.choice([0.2, 0.6, 1.0])
        return lambda: dice.random() < share

    def cut(self, fault: Fault) -> object:
        return self._stage.proxy.cut(self._chosen(fault))

    def lose_replies(self, fault: Fault) -> object:
        return self._stage.proxy.lose_replies(self._chosen(fault))

    def lose_requests(self, fault: Fault) -> object:
        return self._stage.proxy.lose_requests(self._chosen(fault))

    def swallow(self, fault: Fault) -> object:
        return self._stage.proxy.swallow(self._chosen(fault), self._lease * fault.leases)

    def freeze(self, fault: Fault) -> object:
        return self._stage.proxy.freeze(self._chosen(fault), self._lease * fault.leases)

    def delay(self, fault: Fault) -> object:
        latency = fault.dice.choice([0.05, 0.3, 1.0])
        return self._stage.proxy.delay(self._chosen(fault), self._lease * fault.leases, latency)

    def refuse(self, fault: Fault) -> object:
        return self._stage.proxy.refuse(self._lease * fault.leases)
