-- feed: put the next rows of a source into the queue, move its cursor, count the rows that were rejected.
-- KEYS: state done queued payloads rejects
-- ARGV: before after ended rejected rows...
--   before, after: the cursor that this feed started from, and the one it leaves
--   ended: 1 if the source has no rows after these
--   rejected: how many (index reason) pairs come first in rows; (index payload) pairs follow
-- ANSWERS: how many samples were queued, or -1 if the cursor had moved: another feed was here, and nothing was changed
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
if (redis.call('HGET', KEYS[1], 'cursor') or '') ~= ARGV[1] then return -1 end
redis.call('HSET', KEYS[1], 'cursor', ARGV[2], 'ended', ARGV[3])
local at = 5
for _ = 1, tonumber(ARGV[4]) do
  if redis.call('SETBIT', KEYS[2], ARGV[at], 1) == 0 then
    redis.call('HINCRBY', KEYS[1], 'rejected', 1)
    redis.call('HINCRBY', KEYS[5], ARGV[at + 1], 1)
  end
  at = at + 2
end
local queued = 0
while at <= #ARGV do
  -- A row that is done already (after a recovery the cursor starts again) is not queued a second time.
  if redis.call('GETBIT', KEYS[2], ARGV[at]) == 0 then
    -- One by one: a feed has no greatest size, and Lua unpacks some 8,000 values at most.
    redis.call('HSET', KEYS[4], ARGV[at], ARGV[at + 1])
    redis.call('ZADD', KEYS[3], now, ARGV[at])
    queued = queued + 1
  end
  at = at + 2
end
return queued
