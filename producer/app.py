"""The feeds' Celery application: `celery -A producer.app worker`. TOKENMILL_CONFIG names its configuration."""

from functools import cache

from celery import Celery

from common.broker import FEED, make_celery
from common.consumer import TakesWrites
from common.ledger import Ledger
from common.logs import set_up
from common.settings import load_settings
from producer.feed import Feeder

settings = load_settings()
app: Celery = make_celery("tokenmill", settings)
app.steps["consumer"].add(TakesWrites)
set_up(app)


@app.task(name=FEED)
def feed(dataset: str) -> str:
    """Read, render and tokenize the next rows of a dataset."""
    return f"{dataset}: {_feeder().feed(dataset)} samples queued"


@cache
def _feeder() -> Feeder:
    """Made in the process that feeds, never before the fork: neither sockets nor tokenizers survive one."""
    return Feeder(settings, app, Ledger.connect(settings.redis_url))
