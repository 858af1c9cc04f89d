-- admit: set how many samples may still be claimed, and move the dataset to the state that follows.
-- KEYS: state queued leases answers
-- ARGV: room starts window tokens_per_second
--   room: claims allowed from the snapshot on, until the next call; starts: the claims that the snapshot had seen, as
--   later ones have taken of that room already (empty: all so far); window: samples that may wait in Redis
-- ANSWERS: the state
-- Only open and closing datasets move: to exhausted when everything was fed and ended, and no answer waits to be
-- followed by the next turn; to closing, then capped once
-- nothing is in flight, when there is no room; back to open when there is.
local fields = redis.call('HMGET', KEYS[1], 'state', 'ended', 'starts')
local state = fields[1]
if not state then return '' end
local starts = tonumber(fields[3] or '0')
local since = math.max(0, starts - (tonumber(ARGV[2]) or starts))
local room = math.max(0, tonumber(ARGV[1]) - since)
redis.call('HSET', KEYS[1], 'room', room, 'window', ARGV[3], 'tokens_per_second', ARGV[4])
if state ~= 'open' and state ~= 'closing' then return state end
local in_flight = redis.call('ZCARD', KEYS[3])
local after = 'open'
local waits = redis.call('ZCARD', KEYS[2]) + redis.call('HLEN', KEYS[4])
if fields[2] == '1' and in_flight == 0 and waits == 0 then after = 'exhausted'
elseif tonumber(ARGV[1]) <= 0 then after = in_flight == 0 and 'capped' or 'closing' end
if after ~= state then redis.call('HSET', KEYS[1], 'state', after) end
return after
