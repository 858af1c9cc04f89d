-- heartbeat: a process says that it lives and what it does.
-- KEYS: workers
-- ARGV: name facts
--   facts: JSON, shown by status; empty when the process says goodbye
-- ANSWERS: now in milliseconds
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
if ARGV[2] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f', now) .. ' ' .. ARGV[2])
end
return now
