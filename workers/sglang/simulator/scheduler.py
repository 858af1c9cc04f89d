"""The scheduler of a simulated server, in steps, as SGLang 0.5.23 has it (section 3 of the protocol's description).

A step is a prefill of what was admitted, or else one decode of all that runs. A prefill gives the first token of each
of its sequences, a decode one more to each. Requests are admitted, aborted and retracted between steps.

- Admission, first come first served (`PrefillAdder`): the uncached part of the prompt + min(max_new_tokens, 4096) + 1
  must be less than the free and evictable slots less what is reserved for those that run: the sum of
  min(max_new_tokens - generated, 4096) x the new-token ratio (x 1 with ignore_eos). The first that does not fit stops
  the pass, and nobody is tried again until somebody leaves.
- The ratio starts at 0.7 x conservativeness, falls to 0.14 of that over 600 decode steps, and starts again when the
  server goes idle. Long answers are under-reserved by it, so the pool can run full.
- Then some are retracted: least output first, of these the longest prompt. Their ids are kept, they go to the back of
  the queue, and are prefilled again over prompt and output. The ratio becomes what the others have used of theirs.
- A prompt beyond what is left of a prefill's chunk is chunked, one at a time, a chunk a step.

A step costs the same however many run: a sequence is filed under the step that will be its last, and what it has
generated follows from the number of steps done. Only admission and retraction look at all that run.
"""

from collections.abc import Callable

from workers.sglang.simulator.config import SimulatorConfig
from workers.sglang.simulator.engine import End, Engine, Load, Sequence
from workers.sglang.simulator.prefix_cache import PrefixCache

MOST_RESERVED_TOKENS = 4096  # SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION
FIRST_RATIO = 0.7
LOWEST_SHARE = 0.14
DECAY_STEPS = 600
RETRACT_STEPS = 20


class StepEngine(Engine):
    """See the module."""

    def __init__(self, config: SimulatorConfig, clock: Callable[[], float]) -> None:
        super().__init__(config, clock)
        self.new_token_ratio = self._first_ratio = min(FIRST_RATIO * config.schedule_conservativeness, 1.0)
        self.retractions = 0
        self._config = config
        self._cache = PrefixCache() if config.prefix_cache else None
        self._own_tokens = 0  # KV slots in use outside the prefix cache
        self._step_ends_at: float | None = None
        self._steps = 0  # decode steps done
        self._decoded_tokens = 0
        self._last_steps: dict[int, list[Sequence]] = {}
        self._batch: list[Sequence] = []  # in the prefill of this step
        self._chunked: Sequence | None = None
        self._full = False
        self._aborting: list[Sequence] = []
        self._retract_all = False
        self._prompt_tokens = self._hit_tokens = 0

    def due(self) -> float | None:
        return self._step_ends_at

    def advance(self) -> None:
        now = self.clock()
        while self._step_ends_at is not None and self._step_ends_at <= now:
            at = self._step_ends_at
            if self._batch:
                self._end_prefill(at)
            else:
                self._end_decode(at)
            if self._aborting:
                self._abort_those(at)
            self._begin_step(at)

    def load(self) -> Load:
        self.advance()
        rate = len(self.running) / self._decode_seconds() if self.running else 0.0
        return Load(
            running=len(self.running),
            waiting=len(self.waiting),
            used_tokens=self._used_tokens(),
            waiting_tokens=self._waiting_tokens(),
            tokens_per_second=rate,
            retracted=sum(one.num_retractions > 0 for one in self.waiting),
            cached_tokens=self._evictable_tokens(),
            cache_hit_rate=self._hit_tokens / self._prompt_tokens if self._prompt_tokens else 0.0,
            new_token_ratio=self.new_token_ratio,
            decode_steps=self._steps,
            decoded_tokens=self._decoded_tokens,
        )

    def ends_in_this_step(self, rid_prefix: str) -> bool:
        """True if a sequence whose rid begins so gets its last token in the step that is under way."""
        self.advance()
        last = self._steps + 1
        ending = [one for one in self._last_steps.get(last, ()) if one.end is None and one.last_step == last]
        return not self._batch and any(one.rid.startswith(rid_prefix) for one in ending)

    def flush(self) -> bool:
        if self.running or self.waiting:
            return False
        if self._cache is not None:
            self._cache = PrefixCache()
        return True

    def _go_on(self, now: float) -> None:
        if self._step_ends_at is None:
            self._begin_step(now)

    def _abort_running(self, sequence: Sequence, now: float) -> None:
        self._aborting.append(sequence)
        if self._step_ends_at is None:  # held: there is no step to wait for
            self._abort_those(now)

    def _hold(self, now: float, *, retract: bool) -> None:
        if retract:
            self._retract_all = True
        if self._step_ends_at is None:
            self._begin_step(now)

    def _release(self, now: float) -> None:
        self._go_on(now)

    # Steps.

    def _begin_step(self, now: float) -> None:
        self._step_ends_at = None
        if self._retract_all:
            self._retract_all = False
            self._chunked = None
            self._retract(list(self.running), now)
        if self._held:
            return
        tokens = self._begin_prefill(now)
        if self._batch:
            self._step_ends_at = now + self._prefill_seconds(tokens) + self.extra_step_seconds
        elif self.running:
            self._make_room(now)
            self._own_tokens += len(self.running)
            self._step_ends_at = now + self._decode_seconds() + self.extra_step_seconds
        else:
            self._full = False
            self.new_token_ratio = self._first_ratio

    def _begin_prefill(self, now: float) -> int:
        """Fill the batch of this step; how many prompt tokens it computes."""
        if self._chunked is None and (self._full or not self.waiting):
            return 0
        input_left, chunk_left = self._config.max_prefill_tokens, self._config.chunked_prefill_size
        free = self._max_total_tokens - self._used_tokens() - self._reserved_tokens()
        total = 0
        if self._chunked is not None:
            total = self._go_on_chunking(free, chunk_left)
            free -= total
            input_left -= total
            chunk_left -= total
        while self.waiting and input_left > 0 and chunk_left > 0:
            if len(self.running) >= self._max_running_requests:
                self._full = True
                break
            taken = self._try(self.waiting[0], free, input_left, chunk_left)
            if taken is None:
                break
            tokens, charge = taken
            sequence = self.waiting.popleft()
            self._admit(sequence, tokens, now)
            free -= charge
            input_left -= tokens
            chunk_left -= tokens
            total += tokens
        return total

    def _go_on_chunking(self, free: float, chunk_left: int) -> int:
        """The next chunk of the prompt that is being chunked."""
        sequence = self._chunked
        assert sequence is not None
        limit = min(chunk_left, int(free))
        tokens = min(sequence.missing_tokens, limit if limit > 0 else chunk_left)
        self._take_slots(tokens)
        sequence.own_tokens += tokens
        sequence.missing_tokens -= tokens
        self._batch.append(sequence)
        if sequence.missing_tokens == 0:
            self._chunked = None
        return tokens

    def _try(self, sequence: Sequence, free: float, input_left: int, chunk_left: int) -> tuple[int, float] | None:
        """The prompt tokens that this prefill takes of a waiting sequence and what it is charged, if it is admitted."""
        tokens = sequence.prompt_tokens + sequence.generated_tokens
        before = self._used_tokens()
        if self._cache is not None and sequence.input_ids:
            # The last token of a prompt must be computed, or there would be nothing to sample the first one from.
            ids = sequence.input_ids if sequence.generated_tokens else sequence.input_ids[:-1]
            sequence.prefix, matched = self._cache.match(ids)
            self._cache.lock(sequence.prefix)
            tokens -= matched
        new_tokens = min(sequence.max_new_tokens - sequence.generated_tokens, MOST_RESERVED_TOKENS)
        locked = self._used_tokens() - before  # no longer evictable
        fits = tokens + new_tokens + 1 < free - locked
        if fits and (tokens < input_left or not self._batch):
            if tokens <= chunk_left:
                return tokens, locked + tokens + new_tokens
            return chunk_left, locked + chunk_left
        self._full = self._full or not fits
        self._drop_prefix(sequence)
        return None

    def _admit(self, sequence: Sequence, tokens: int, now: float) -> None:
        matched = self._matched_tokens(sequence)
        self._take_slots(tokens)
        sequence.own_tokens = tokens
        sequence.missing_tokens = sequence.prompt_tokens + sequence.generated_tokens - matched - tokens
        if sequence.missing_tokens:
            self._chunked = sequence
        if sequence.cached_tokens is None:
            sequence.cached_tokens = matched
            sequence.admitted_at = now
            self._prompt_tokens += sequence.prompt_tokens
            self._hit_tokens += matched
        self.running[sequence] = None
        self._batch.append(sequence)

    def _end_prefill(self, now: float) -> None:
        batch, self._batch = self._batch, []
        for sequence in batch:
            if sequence is self._chunked:
                continue
            self._share_prompt(sequence)
            if sequence.first_token_at is None:
                sequence.first_token_at = now
            sequence.generated_tokens = min(sequence.generated_tokens + 1, sequence.completion_tokens)
            sequence.decodes_since = self._steps
            missing = sequence.completion_tokens - sequence.generated_tokens
            if missing:
                sequence.last_step = self._steps + missing
                self._last_steps.setdefault(sequence.last_step, []).append(sequence)
            else:
                self._stop(sequence, End.FINISHED, now)

    def _end_decode(self, now: float) -> None:
        self._steps += 1
        self._decoded_tokens += len(self.running)
        for sequence in self._last_steps.pop(self._steps, ()):
            # One that was retracted, or aborted, stays filed under the step that would have been its last.
            if sequence.end is None and sequence.last_step == self._steps:
                self._stop(sequence, End.FINISHED, now)

    def _abort_those(self, now: float) -> None:
        aborting, self._aborting = self._aborting, []
        for sequence in aborting:
            if sequence is self._chunked and not self._held:
                self._aborting.append(sequence)  # the real server, too, lets the chunks come to their end
            elif sequence.end is None and sequence in self.running:
                if sequence is self._chunked:
                    self._chunked = None
                self._stop(sequence, End.ABORTED, now)
            elif sequence.end is None:  # retracted meanwhile
                self.waiting.remove(sequence)
                self._end(sequence, End.ABORTED_WAITING, now)

    def _stop(self, sequence: Sequence, end: End, now: float) -> None:
        del self.running[sequence]
        self._full = False
        self._own_tokens -= self._stop_decoding(sequence)
        if sequence.prefix is not None:
            assert self._cache is not None
            self._cache.add_answer(sequence.prefix, sequence.own_tokens)
        self._drop_prefix(sequence)
        self._end(sequence, end, now)

    # The KV pool.

    def _used_tokens(self) -> int:
        """Slots that cannot be evicted."""
        return self._own_tokens + (0 if self._cache is None else self._cache.locked_tokens)

    def _evictable_tokens(self) -> int:
        return 0 if self._cache is None else self._cache.tokens - self._cache.locked_tokens

    def _reserved_tokens(self) -> float:
        reserved = 0.0
        for sequence in self.running:
            if sequence is not self._chunked:
                new_tokens = min(sequence.max_new_tokens - self.generated(sequence), MOST_RESERVED_TOKENS)
                reserved += new_tokens * (1.0 if sequence.ignore_eos else self.new_token_ratio)
        return reserved

    def _take_slots(self, tokens: int) -> None:
        self._evict_for(tokens)
        self._own_tokens += tokens

    def _evict_for(self, tokens: int) -> bool:
        """Evict until so many slots are free; False if there are not so many."""
        missing = tokens - (self._max_total_tokens - self._used_tokens() - self._evictable_tokens())
        if missing > 0 and self._cache is not None:
            self._cache.evict(missing)
        return self._max_total_tokens - self._used_tokens() >= tokens

    def _make_room(self, now: float) -> None:
        """See to it that each that runs has a slot for its next token."""
        if self._evict_for(len(self.running)):
            lowest = LOWEST_SHARE * self._first_ratio
            decay = (self._first_ratio - lowest) / DECAY_STEPS
            self.new_token_ratio = max(self.new_token_ratio - decay, lowest)
            return
        order = sorted(self.running, key=lambda one: (self.generated(one), -one.prompt_tokens))
        left = len(order)
        while left > 1:
            self._retract(order[len(order) - left : len(order) - left + 1], now)
            left -= 1
            if self._evict_for(left):
                break
        generated = sum(self.generated(one) for one in self.running)
        most = sum(one.max_new_tokens for one in self.running)
        self.new_token_ratio = min((generated + RETRACT_STEPS * left) / (most + 1), 1.0)

    def _retract(self, sequences: list[Sequence], now: float) -> None:
        """Back to the end of the queue: the KV is dropped, the ids are kept."""
        for sequence in sequences:
            del self.running[sequence]
            self._own_tokens -= self._stop_decoding(sequence)
            self._drop_prefix(sequence)
            sequence.num_retractions += 1
            self.retractions += 1
            self._full = False
            if self._queue_is_full():
                self._end(sequence, End.QUEUE_FULL, now)
            else:
                self.waiting.append(sequence)

    def _stop_decoding(self, sequence: Sequence) -> int:
        """Settle what a running sequence has by now; the KV slots that it alone held."""
        generated = self.generated(sequence)
        if sequence.decodes_since is not None:
            sequence.own_tokens += self._steps - sequence.decodes_since
            sequence.decodes_since = sequence.last_step = None
        sequence.generated_tokens = generated
        return sequence.own_tokens

    def generated(self, sequence: Sequence) -> int:
        if sequence.decodes_since is None:
            return sequence.generated_tokens
        return min(sequence.generated_tokens + self._steps - sequence.decodes_since, sequence.completion_tokens)

    def _matched_tokens(self, sequence: Sequence) -> int:
        tokens, node = 0, sequence.prefix
        while node is not None:
            tokens += node.tokens
            node = node.parent
        return tokens

    def _share_prompt(self, sequence: Sequence) -> None:
        """Once its prompt is computed, others can stand on it."""
        if self._cache is None or sequence.prefix is None:
            return
        own = sequence.prompt_tokens - self._matched_tokens(sequence)
        shared = self._cache.insert(sequence.input_ids)
        self._cache.lock(shared)
        self._cache.unlock(sequence.prefix)
        sequence.prefix = shared
        sequence.own_tokens -= own
        self._own_tokens -= own

    def _drop_prefix(self, sequence: Sequence) -> None:
        if sequence.prefix is not None:
            assert self._cache is not None
            self._cache.unlock(sequence.prefix)
            sequence.prefix = None

    # Time.

    def _prefill_seconds(self, prompt_tokens: int) -> float:
        if self._config.tokens_per_second is not None:
            return 0.0
        return self._config.prefill_base_seconds + prompt_tokens / self._config.prefill_tokens_per_second

    def _decode_seconds(self) -> float:
        config = self._config
        if config.tokens_per_second is not None:
            return 1 / config.tokens_per_second
        running = config.step_request_seconds * len(self.running)
        return config.step_base_seconds + running + config.step_token_seconds * self._used_tokens()
