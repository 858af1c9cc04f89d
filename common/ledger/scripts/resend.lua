-- resend: mark queued samples as sent now, so that one caller alone sends the message.
-- KEYS: queued
-- ARGV: before_ms indices...
--   before_ms: only samples last sent before this time
-- ANSWERS: the indices to send
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local due = {}
for i, score in ipairs(redis.call('ZMSCORE', KEYS[1], unpack(ARGV, 2))) do
  if score and tonumber(score) < tonumber(ARGV[1]) then
    redis.call('ZADD', KEYS[1], now, ARGV[i + 1])
    due[#due + 1] = tonumber(ARGV[i + 1])
  end
end
return due
