-- observe: keep how attempts ended, for the budget's estimate of lengths.
-- KEYS: state outcomes lost done
-- ARGV: kept size packed lost...
--   kept: the newest so many outcomes are kept, in a ring; size: bytes of one; packed: outcomes, each of that size
--   lost: (index clock) of the attempts that were lost: the furthest of a sample is kept until it ends
-- ANSWERS: how many were ever observed
-- The one script that is not idempotent: a call that is repeated enters its outcomes twice, and shifts an estimate a little.
local kept, size = tonumber(ARGV[1]), tonumber(ARGV[2])
local n = #ARGV[3] / size
local seen = redis.call('HINCRBY', KEYS[1], 'outcomes', n)
local packed = ARGV[3]
if n > kept then packed = string.sub(packed, (n - kept) * size + 1) end
n = #packed / size
local first = (seen - n) % kept
local before_end = math.min(n, kept - first)
redis.call('SETRANGE', KEYS[2], first * size, string.sub(packed, 1, before_end * size))
if before_end < n then redis.call('SETRANGE', KEYS[2], 0, string.sub(packed, before_end * size + 1)) end
for at = 4, #ARGV, 2 do
  local before = tonumber(redis.call('HGET', KEYS[3], ARGV[at]) or '0')
  if tonumber(ARGV[at + 1]) > before and redis.call('GETBIT', KEYS[4], ARGV[at]) == 0 then
    redis.call('HSET', KEYS[3], ARGV[at], ARGV[at + 1])
  end
end
return seen
