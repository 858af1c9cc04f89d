-- snapshot: everything that status and the keeper read of a dataset, at one instant.
-- KEYS: state queued leases lengths rejects flags stopped answers resumed
-- ARGV:
-- ANSWERS: {now_ms, state fields, queued, of these in messages, in flight, lengths by bucket, rejects by reason, flags,
--   turns not made by reason, answers to be followed, answers whose row is to be read again}; maps as flat lists
local t = redis.call('TIME')
return {
  t[1] * 1000 + math.floor(t[2] / 1000),
  redis.call('HGETALL', KEYS[1]),
  redis.call('ZCARD', KEYS[2]),
  redis.call('ZCOUNT', KEYS[2], 1, '+inf'),
  redis.call('ZCARD', KEYS[3]),
  redis.call('HGETALL', KEYS[4]),
  redis.call('HGETALL', KEYS[5]),
  redis.call('HGETALL', KEYS[6]),
  redis.call('HGETALL', KEYS[7]),
  redis.call('HLEN', KEYS[8]),
  redis.call('HLEN', KEYS[9]),
}
