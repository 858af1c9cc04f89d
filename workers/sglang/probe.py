"""A server asked to prove what it is: how it reads a text, and whether what it answers can be trusted.

An id that a server does not know kills it (observed with 0.5.23), and no server says how many it knows. So none is sent
that may be one: a text is read by the server's own tokenizer, and ids are compared where it says them.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from workers.sglang.answer import Acceptance, Answer, BadAnswer, refusal
from workers.sglang.http import Http
from workers.sglang.inquiry import cause
from workers.sglang.loads import LoadReader
from workers.sglang.preflight import ServerFacts

# Every model of text knows these: the smallest vocabularies are those of bytes.
SURE_IDS = tuple(range(100, 116))
# What tokenizers cut differently: scripts, digits, code, spaces. No control token, and no word that could be one.
ODD_TEXT = (
    "The 1234567 quick-brown foxes' résumé; naïve Größe, 你好世界, привет мир, שלום, こんにちは 🙂.\n"
    "def f(x):\n    return {x: 2**x, 'y': [3.14159]}  # O(n log n)\n\tantidisestablishmentarianism"
)
ABORT_SECONDS = 2.0
_TEXT_BYTES = 4 << 20
_ANSWER_BYTES = 16 << 20
_BROKEN = (aiohttp.ClientError, OSError)


class Reply(msgspec.Struct, frozen=True):
    """An accepted answer, or the reason (of workers.sglang.answer, or `late`) and detail why there is none."""

    answer: Answer | None
    seconds: float
    reason: str = ""
    detail: str = ""


class TextRead(msgspec.Struct, frozen=True):
    """How a server reads a text: the ids, where it says them, and how many there are.

    `added`: a token may stand before and behind those of the text, such as Llama's <|begin_of_text|>.
    """

    count: int
    ids: list[int] | None = None
    added: bool = False


class Prober:
    """One server, asked for little; nothing here raises for what it answers."""

    def __init__(self, facts: ServerFacts, api_key: str | None, http: Http) -> None:
        self._facts = facts
        self._http = http
        self._headers = {
            "content-type": "application/json",
            "accept-encoding": "identity",
            "user-agent": "tokenmill",
            **({"authorization": f"Bearer {api_key}"} if api_key else {}),
        }

    async def waiting(self) -> int:
        """How many requests wait there: it is full then, and what is sent waits behind them. 0 if it does not say."""
        load = await LoadReader(self._facts.url, self._headers, self._http).read()
        return load.waiting if load else 0

    async def tokenized(self, text: str, patience_seconds: float) -> TextRead | None:
        """How the server reads `text`, by /tokenize, which asks no scheduler; None if it has none."""
        told = await self._told("/tokenize", {"prompt": text, "add_special_tokens": False}, patience_seconds)
        ids = _ids(told.get("tokens")) if told else None
        return None if ids is None else TextRead(len(ids), ids)

    async def read(self, text: str, patience_seconds: float) -> TextRead | None:
        """The same by an answer of one token; None if it takes no text, as with --skip-tokenizer-init."""
        body = {
            "text": text,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_prompt_token_ids": True,  # since 0.5.13; older ones let it pass
        }
        told = await self._told("/generate", body, patience_seconds)
        if not told or not isinstance(meta := told.get("meta_info"), dict):
            return None
        count = meta.get("prompt_tokens")
        return TextRead(count, _ids(told.get("prompt_token_ids")), added=True) if isinstance(count, int) else None

    async def _told(self, path: str, body: Mapping[str, Any], patience_seconds: float) -> dict[str, Any] | None:
        try:
            async with asyncio.timeout(patience_seconds):
                status, answer = await self._http.request(
                    "POST", self._facts.url + path, self._headers, msgspec.json.encode(body), _TEXT_BYTES
                )
            told = msgspec.json.decode(answer) if status == 200 else None
        except (BadAnswer, msgspec.DecodeError, RecursionError, TimeoutError, *_BROKEN):
            return None
        return told if isinstance(told, dict) else None

    async def answer(
        self, input_ids: Sequence[int], sampling_params: Mapping[str, Any], vocab_size: int, patience_seconds: float
    ) -> Reply:
        """One answer, checked as those of a job are; what takes longer than `patience_seconds` is aborted."""
        rid, started = f"{random.getrandbits(128):032x}", time.monotonic()
        body = msgspec.json.encode({"rid": rid, "sampling_params": sampling_params, "input_ids": input_ids})
        try:
            async with asyncio.timeout(patience_seconds):
                status, told = await self._http.request(
                    "POST", f"{self._facts.url}/generate", self._headers, body, _ANSWER_BYTES
                )
            if status != 200:
                raise refusal(status, told)
            accepted = Acceptance(vocab_size, self._facts.weight_version).check(
                told, rid=rid, prompt_tokens=len(input_ids), max_new_tokens=int(sampling_params["max_new_tokens"])
            )
        except BadAnswer as bad:
            return Reply(None, time.monotonic() - started, bad.reason, bad.detail)
        except TimeoutError:
            await self._abort(rid)
            return Reply(None, time.monotonic() - started, "late", f"no answer within {patience_seconds:.0f} s")
        except _BROKEN as error:
            return Reply(None, time.monotonic() - started, "connection_lost", cause(error))
        except asyncio.CancelledError:
            await self._abort(rid)
            raise
        return Reply(accepted, time.monotonic() - started)

    async def _abort(self, rid: str) -> None:
        if not self._facts.takes_aborts:
            return
        with contextlib.suppress(TimeoutError, BadAnswer, *_BROKEN):
            async with asyncio.timeout(ABORT_SECONDS):
                body = msgspec.json.encode({"rid": rid})
                await self._http.request("POST", f"{self._facts.url}/abort_request", self._headers, body, _TEXT_BYTES)


def _ids(value: Any) -> list[int] | None:
    return value if isinstance(value, list) and all(isinstance(one, int) for one in value) else None
