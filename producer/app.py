"""The feeds' Celery application: `celery -A producer.app worker`. TOKENMILL_CONFIG names its configuration."""

from functools import cache

from celery import Celery

from common.broker import FEED, RESTORE, make_celery
from common.consumer import TakesWrites, set_up
from common.ledger import Ledger
from common.settings import load_settings
from common.words import counted
from producer.feed import Feeder
from producer.restore import restore as restore_books

settings = load_settings()
app: Celery = make_celery("tokenmill", settings)
app.steps["consumer"].add(TakesWrites)
set_up(app)


@app.task(name=FEED)
def feed(dataset: str) -> str:
    """Read, render and tokenize the next rows of a dataset."""
    return f"{dataset}: {counted(_feeder().feed(dataset), 'sample')} queued"


@app.task(name=RESTORE)
def restore() -> str:
    """Build the books of datasets anew that Redis has forgotten."""
    return restore_books(settings, _ledger())


# Made in the process that feeds, never before the fork: neither sockets nor tokenizers survive one.


@cache
def _feeder() -> Feeder:
    return Feeder(settings, app, _ledger())


@cache
def _ledger() -> Ledger:
    return Ledger.connect(settings.redis_url)
