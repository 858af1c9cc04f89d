"""The workers' Celery application, `celery -A workers.app worker`; TOKENMILL_CONFIG names its configuration."""

from celery import Celery

from common.broker import make_celery
from common.consumer import TakesWrites, set_up
from common.settings import load_settings
from workers.pool import FewMessages

settings = load_settings()
app: Celery = make_celery("tokenmill", settings)
app.conf.tokenmill = settings
app.conf.include = ["workers.tasks"]
app.conf.worker_pool = "workers.pool:AsyncioPool"
app.steps["consumer"].update((TakesWrites, FewMessages))
set_up(app)
