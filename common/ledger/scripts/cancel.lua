-- cancel: end a dataset for good, and withdraw what waits in its queue.
-- KEYS: state queued payloads prompts tries
-- ARGV: reason
-- ANSWERS: {the state it was in, how many samples were withdrawn}
-- What is in flight goes on, and counts when it is settled. The keeper calls this again for what was given back, or
-- fed by a feed that was at it. An unknown dataset stays unknown.
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return {'', 0} end
if state ~= 'cancelled' then redis.call('HSET', KEYS[1], 'state', 'cancelled', 'reason', ARGV[1], 'room', 0) end
local queued = redis.call('ZRANGE', KEYS[2], 0, -1)
for first = 1, #queued, 1000 do
  local some = {unpack(queued, first, math.min(first + 999, #queued))}
  redis.call('HDEL', KEYS[3], unpack(some))
  redis.call('HDEL', KEYS[4], unpack(some))
  redis.call('HDEL', KEYS[5], unpack(some))
end
redis.call('DEL', KEYS[2])
return {state, #queued}
