-- feed: put the next rows of a source into the queue, move its cursor, count the rows that were rejected.
-- KEYS: state done queued payloads rejects prompts
-- ARGV: before after ended rejected rows...
--   before, after: the cursor that this feed started from, and the one it leaves
--   ended: 1 if the source has no rows after these
--   rejected: how many (index reason) pairs come first in rows; (index payload tokens) follow, with the
--   prompt's tokens where the budget counts them, else 0
-- ANSWERS: how many samples were queued, or -1 if the cursor had moved: another feed was here, and nothing was changed
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
local queued, bytes, fed = 0, 0, tonumber(redis.call('HGET', KEYS[1], 'fed') or '0')
while at <= #ARGV do
  -- A row that is done already (after a recovery the cursor starts again) is not queued a second time.
  if redis.call('GETBIT', KEYS[2], ARGV[at]) == 0 then
    -- One by one: a feed has no greatest size, and Lua unpacks some 8,000 values at most.
    redis.call('HSET', KEYS[4], ARGV[at], ARGV[at + 1])
    -- In no message yet, behind what was given back and what was fed before (_keys.py). In the order of the indices a
    -- shuffled source would not be shuffled: the last rows of it would wait while others are fed.
    redis.call('ZADD', KEYS[3], string.format('%.17g', 0.5 + (fed + queued + 1) / 2 ^ 40), ARGV[at])
    if ARGV[at + 2] ~= '0' then redis.call('HSET', KEYS[6], ARGV[at], ARGV[at + 2]) end
    queued = queued + 1
    bytes = bytes + #ARGV[at + 1]
  end
  at = at + 3
end
redis.call('HINCRBY', KEYS[1], 'fed', queued)
redis.call('HINCRBY', KEYS[1], 'fed_bytes', bytes)
return queued
