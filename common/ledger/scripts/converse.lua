-- converse: queue the next turns of conversations, each with what is still to come of its own; or end these.
-- KEYS: state done queued leases payloads prompts conversations answers resumed stopped
-- ARGV: before turns...
--   before: the cursor that this feed started from
--   turns: (follows earlier index payload tokens conversation) each
--     follows: the sample whose answer this turn follows, or empty: it is the first of its row
--     earlier: so many samples before that one are of the same conversation; they are not waited for any more
--     index: the sample to queue, with its prompt's tokens where the budget counts them, else 0; or empty where the
--     conversation ends, with the reason as payload, and as tokens the number of turns that are not made
--     conversation: what its later turns need; empty if it is the last
-- ANSWERS: how many samples were queued, or -1 if the cursor had moved: another feed was here, and nothing was changed
-- An answer is followed once, and a first turn queued once, however often this is called.
if (redis.call('HGET', KEYS[1], 'cursor') or '') ~= ARGV[1] then return -1 end
local queued, bytes = 0, 0
for at = 2, #ARGV, 6 do
  local follows, index, payload = ARGV[at], ARGV[at + 2], ARGV[at + 3]
  local due = true
  if follows == '' then
    due = not redis.call('ZSCORE', KEYS[3], index) and not redis.call('ZSCORE', KEYS[4], index)
  else
    due = redis.call('HDEL', KEYS[8], follows) + redis.call('HDEL', KEYS[9], follows) > 0
    redis.call('HDEL', KEYS[7], follows)
    for back = 1, tonumber(ARGV[at + 1]) do redis.call('HDEL', KEYS[9], follows - back) end
  end
  if due and index == '' then
    redis.call('HINCRBY', KEYS[10], payload, ARGV[at + 4])
  elseif due and redis.call('GETBIT', KEYS[2], index) == 0 then
    redis.call('HSET', KEYS[5], index, payload)
    if ARGV[at + 5] ~= '' then redis.call('HSET', KEYS[7], index, ARGV[at + 5]) end
    redis.call('ZADD', KEYS[3], string.format('%.17g', 0.5 + (index + 1) / 2 ^ 40), index)
    if ARGV[at + 4] ~= '0' then redis.call('HSET', KEYS[6], index, ARGV[at + 4]) end
    queued = queued + 1
    bytes = bytes + #payload
  elseif due then
    -- Answered by a worker that went on while the ledger was lost and built anew: it can be followed now.
    local answer = redis.call('HGET', KEYS[9], index)
    if answer then
      redis.call('HDEL', KEYS[9], index)
      redis.call('HSET', KEYS[8], index, answer)
      redis.call('HSET', KEYS[7], index, ARGV[at + 5])
    end
  end
end
redis.call('HINCRBY', KEYS[1], 'fed', queued)
redis.call('HINCRBY', KEYS[1], 'fed_bytes', bytes)
return queued
