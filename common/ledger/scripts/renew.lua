-- renew: prolong the leases of attempts that still run.
-- KEYS: done attempts queued leases owners suspects
-- ARGV: owner lease_ms samples...
--   samples: (index attempt) pairs
-- ANSWERS: the indices whose attempt is not the current one any more; their answers will be superseded
-- A lease that ran out while nobody else claimed the sample is taken up again: a worker that was frozen goes on.
-- A suspect whose time alone (see claim) is over has not killed its owner: it is noted no longer.
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local lost = {}
local has_notes = redis.call('EXISTS', KEYS[6]) == 1
for at = 3, #ARGV, 2 do
  local index, attempt = ARGV[at], tonumber(ARGV[at + 1])
  local current = redis.call('GETRANGE', KEYS[2], index * 6, index * 6 + 5)
  local mine = #current == 6 and struct.unpack('>I6', current) == attempt
  if mine and redis.call('GETBIT', KEYS[1], index) == 0 then
    redis.call('ZREM', KEYS[3], index)
    redis.call('ZADD', KEYS[4], now + tonumber(ARGV[2]), index)
    redis.call('HSET', KEYS[5], index, ARGV[1])
    local note = has_notes and redis.call('HGET', KEYS[6], KEYS[4] .. ' ' .. index)
    if note and tonumber(string.match(note, '^%d+')) <= now then
      redis.call('HDEL', KEYS[6], KEYS[4] .. ' ' .. index)
    end
  elseif not mine then
    lost[#lost + 1] = tonumber(index)
  end
end
return lost
