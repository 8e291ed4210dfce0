"""The scripted app, telling at each item's end whether it is still ours, and each verdict."""

from typing import Any

from fanout_procrastinate import ItemContext, database
from tests.apps import scripted

app = scripted.app

_end = scripted._end
_run_async = database.Database.run_async


def _told(context: ItemContext, step: scripted.Step) -> str:
    mine = context.still_mine()
    scripted.log.write("mine", run=context.run_id, item=step.name, mine=mine)
    return _end(context, step)


async def _heard(self: database.Database, call: Any) -> Any:
    result = await _run_async(self, call)
    for reply in result if call.name == "report" else ():
        scripted.log.write("verdict", verdict=reply.verdict, epoch=reply.epoch)
    return result


scripted._end = _told
database.Database.run_async = _heard  # type: ignore[method-assign]
