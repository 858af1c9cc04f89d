-- expire: take samples back from attempts whose lease ran out.
-- KEYS: attempts queued leases owners tries state
-- ARGV: max_tries limit hold_ms
--   max_tries: a sample that lost this many attempts is not queued again; it stays leased for hold_ms, for the keeper to reject
-- ANSWERS: two flat lists: (index owner) of the samples queued again, (index attempt owner) of those at the end of their tries
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local back, ended = {}, {}
for _, index in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now, 'LIMIT', 0, ARGV[2])) do
  local owner = redis.call('HGET', KEYS[4], index) or ''
  redis.call('HINCRBY', KEYS[6], 'expired', 1)
  if redis.call('HINCRBY', KEYS[5], index, 1) >= tonumber(ARGV[1]) then
    local last = redis.call('GETRANGE', KEYS[1], index * 6, index * 6 + 5)
    redis.call('ZADD', KEYS[3], now + tonumber(ARGV[3]), index)
    ended[#ended + 1] = tonumber(index)
    ended[#ended + 1] = struct.unpack('>I6', last)
    ended[#ended + 1] = owner
  else
    redis.call('ZREM', KEYS[3], index)
    redis.call('HDEL', KEYS[4], index)
    redis.call('ZADD', KEYS[2], 0, index)
    back[#back + 1] = tonumber(index)
    back[#back + 1] = owner
  end
end
return {back, ended}
