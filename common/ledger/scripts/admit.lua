-- admit: set how many samples may still be claimed, and move the dataset to the state that follows.
-- KEYS: state queued leases
-- ARGV: room window per_message tokens_per_second
--   room: claims allowed until the next call; window: samples that may wait in Redis; per_message: samples a message
-- ANSWERS: the state
-- Only open and closing datasets move: to exhausted when everything was fed and ended; to closing, then capped once
-- nothing is in flight, when there is no room; back to open when there is.
local fields = redis.call('HMGET', KEYS[1], 'state', 'ended')
local state = fields[1]
if not state then return '' end
redis.call('HSET', KEYS[1], 'room', ARGV[1], 'window', ARGV[2], 'per_message', ARGV[3], 'tokens_per_second', ARGV[4])
if state ~= 'open' and state ~= 'closing' then return state end
local in_flight = redis.call('ZCARD', KEYS[3])
local after = 'open'
if fields[2] == '1' and in_flight == 0 and redis.call('ZCARD', KEYS[2]) == 0 then after = 'exhausted'
elseif tonumber(ARGV[1]) <= 0 then after = in_flight == 0 and 'capped' or 'closing' end
if after ~= state then redis.call('HSET', KEYS[1], 'state', after) end
return after
