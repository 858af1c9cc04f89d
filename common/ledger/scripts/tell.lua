-- tell: a worker says how far its answers of one dataset have come.
-- KEYS: clocks
-- ARGV: owner packed
--   packed: 20 bytes an answer in flight (_outcomes.py); empty when there is none
-- ANSWERS: now in milliseconds
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
if ARGV[2] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], struct.pack('>d', now) .. ARGV[2])
end
return now
