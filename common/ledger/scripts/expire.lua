-- expire: take samples back from attempts whose lease ran out.
-- KEYS: attempts queued leases owners tries state suspects
-- ARGV: max_tries limit hold_ms
--   max_tries: a sample that lost this many attempts is not queued again; it stays leased for hold_ms, for the keeper to
--   reject. Nor is a suspect that was alone when its owner was last heard of (see claim): it is what killed it.
-- ANSWERS: two flat lists of (index attempt owner): the samples queued again, and those at the end of their tries
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local back, ended = {}, {}
for _, index in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now, 'LIMIT', 0, ARGV[2])) do
  local owner = redis.call('HGET', KEYS[4], index) or ''
  local attempt = struct.unpack('>I6', redis.call('GETRANGE', KEYS[1], index * 6, index * 6 + 5))
  local was_alone = redis.call('HEXISTS', KEYS[7], KEYS[3] .. ' ' .. index) == 1
  local answer = back
  redis.call('HINCRBY', KEYS[6], 'expired', 1)
  if redis.call('HINCRBY', KEYS[5], index, 1) >= tonumber(ARGV[1]) or was_alone then
    redis.call('ZADD', KEYS[3], now + tonumber(ARGV[3]), index)
    answer = ended
  else
    redis.call('ZREM', KEYS[3], index)
    redis.call('HDEL', KEYS[4], index)
    redis.call('ZADD', KEYS[2], string.format('%.17g', (index + 1) / 2 ^ 40), index)
  end
  answer[#answer + 1] = tonumber(index)
  answer[#answer + 1] = attempt
  answer[#answer + 1] = owner
end
return {back, ended}
