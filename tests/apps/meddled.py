"""The scripted app beside procrastinate's usual housekeeping, without any patience."""

import procrastinate

from tests.apps import scripted

app = scripted.app
SILENT_SECONDS = 1
"""A tenth of the interval of the host's heartbeat: every worker looks stalled, living ones too."""
REMOVE = "builtin:procrastinate.builtin_tasks.remove_old_jobs"


@app.periodic(cron="* * * * * */2")
@app.task(queue=scripted.QUEUE, queueing_lock="retry_stalled", pass_context=True)
async def retry_stalled(context: procrastinate.JobContext, timestamp: int) -> None:
    """Put back what looks stalled: the recipe of procrastinate's documentation."""
    manager = context.app.job_manager
    for job in await manager.get_stalled_jobs(seconds_since_heartbeat=SILENT_SECONDS):
        scripted.log.write("stalled", job=job.id, task=job.task_name)
        await manager.retry_job(job)


@app.periodic(cron="* * * * * */1")
@app.task(queue=scripted.QUEUE, queueing_lock="keep_house")
async def keep_house(timestamp: int) -> None:
    """Remove all jobs that have ended."""
    await app.configure_task(REMOVE, queue=scripted.QUEUE).defer_async(
        max_hours=0, remove_failed=True, remove_cancelled=True, remove_aborted=True
    )
