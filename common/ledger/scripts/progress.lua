-- progress: what is in flight and how the last attempts ended, at one instant.
-- KEYS: leases clocks outcomes prompts lost
-- ARGV:
-- ANSWERS: {now_ms, leases (a flat list of index and when it runs out in ms), clocks by worker (a flat list), outcomes (packed),
--   prompt tokens by index, furthest lost clock by index (flat lists)}
local t = redis.call('TIME')
return {
  t[1] * 1000 + math.floor(t[2] / 1000),
  redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES'),
  redis.call('HGETALL', KEYS[2]),
  redis.call('GET', KEYS[3]) or '',
  redis.call('HGETALL', KEYS[4]),
  redis.call('HGETALL', KEYS[5]),
}
