-- release: give samples back to the queue; the keeper sends them again at once.
-- KEYS: attempts queued leases owners tries suspects
-- ARGV: failed samples...
--   failed: 1 if the attempt failed and counts against the sample's tries, 0 if the worker merely stops
--   samples: (index attempt) pairs
-- ANSWERS: how many were given back; an attempt that is not the current one, or has no lease, changes nothing
local n = 0
for at = 2, #ARGV, 2 do
  local index = ARGV[at]
  local current = redis.call('GETRANGE', KEYS[1], index * 6, index * 6 + 5)
  if #current == 6 and struct.unpack('>I6', current) == tonumber(ARGV[at + 1])
     and redis.call('ZREM', KEYS[3], index) == 1 then
    redis.call('HDEL', KEYS[4], index)
    redis.call('HDEL', KEYS[6], KEYS[3] .. ' ' .. index)
    redis.call('ZADD', KEYS[2], string.format('%.17g', (index + 1) / 2 ^ 40), index)
    if ARGV[1] == '1' then redis.call('HINCRBY', KEYS[5], index, 1) end
    n = n + 1
  end
end
return n
