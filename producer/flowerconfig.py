"""Flower's configuration file, as `tokenmill flower` gives it: each name here is one of Flower's options."""

from celery.events.state import Task

# What a person looks for: which samples, what came of them, how long it took.
tasks_columns = "name,args,state,result,runtime,worker,received"
natural_time = False
# A task takes 2 kB here. The ledger counts all answers; Flower is for the latest.
max_tasks = 50_000
# A worker that has ended leaves the list after an hour.
purge_offline_workers = 3600


def format_task(task: Task) -> Task:
    """Take the quotes off the texts: they are sentences already (common/broker.py, workers/samples.py)."""
    for name in ("args", "result"):
        value = getattr(task, name, None)
        if isinstance(value, str):
            setattr(task, name, value.strip("'\""))
    return task
